/* Words of an error, as they are pasted: the site's search takes each word for the beginning of longer ones, so
   that "a" and "is" find everything. From four words on, whole words count, the first ones twice. Values, paths,
   numbers and the shortest words are left out: each error has others. */
const CASE = /(^|\s)'[^']*'|\S*[/\\]\S*/g;
const SEPARATOR = /[\s\-,:;!?=\[\]{}()"'`/<>*+|~^]+|\.(?!\d)/;
const FIRST = 8;
const QUERY = 2; // the kind of message by which the page asks the search's worker
const post = Worker.prototype.postMessage;

function wholeWords(query) {
  const words = [...new Set(query.replace(CASE, " ").split(SEPARATOR))];
  const kept = words.filter((word) => word.length > 2 && !/\d/.test(word));
  return kept.length < 4 ? query : kept.map((word, place) => `${word}^${place < FIRST ? 2 : 1}`).join(" ");
}

Worker.prototype.postMessage = function (message, ...rest) {
  const asks = message && message.type === QUERY && typeof message.data === "string";
  return post.call(this, asks ? { ...message, data: wholeWords(message.data) } : message, ...rest);
};
