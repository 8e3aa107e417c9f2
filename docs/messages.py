"""Writes docs/messages.md: every error and warning of the package, each under a heading of its own.

    python docs/messages.py

A place is a file and a function: lines would change with every edit. What a message says of a case is kept in
braces here, and slanted on the page.
"""

from __future__ import annotations

import ast
import builtins
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdp_wrap"
TARGET = ROOT / "docs" / "messages.md"
WARNS = {"warn", "warn_caller", "warning"}
Texts = dict[str, list[ast.expr]]
PLAINER = (
    (r"\bself\.", ""),
    (r"\bdist\.get_rank\(\)", "rank"),
    (r"\btype\(([\w.]+)\)\.__(qual)?name__", r"class of \1"),
    (r"\.__(qual)?name__", ""),
    (r"'[,; ]*(while )?'\.join\((.*)\)$", r"\2"),
    (r"\b(?:tuple|list|sorted|repr|str)\(([\w.]+)\)", r"\1"),
    (r"\bmap\(repr, ([\w.]+)\)", r"\1"),
    (r"\b_+(?=[a-zA-Z])", ""),
)
HEAD = """# Messages

Every error and warning of the package has an entry here. Put the words of yours into the search above, or
into the search of your browser. Names, shapes and numbers are *slanted* here, since each case has others:
leave them out in the browser's search. Under a message stand its class and the function that raises it, as a
traceback has them. `docs/messages.py` writes this page from the source.
"""
AREAS = {
    ".": "Wrapping and sharding",
    "_activations": "Activations in host memory",
    "_comm": "Ranks and process groups",
    "_comm/shared_memory": "Shared memory of a host",
    "_comm/watching": "Ranks that do not come",
    "_compression": "Compressed communication",
    "_state_over_replicas": "State over replicas",
    "_core": "Settings, modules and hooks",
    "_core/optimizers": "Optimizers as they are given",
    "_params": "Parameters",
    "_params/extensions": "Parameters of other libraries",
    "_params/parallel": "Parameters on meshes",
    "_runtime": "Forward and backward",
    "_state": "State dicts and full parameters",
    "_state/gradients": "Gradients: norms, clipping, scaling, hooks",
    "_reproducible": "The same bits at any number of ranks",
    "_uneven": "Ranks with fewer batches",
    "_values": "Values that are not finite, and records of values",
    "_values/verifying": "Whether sharded training is right",
    "_values/auditing": "Silent corruption",
    "_writer_process": "Checkpoints in the background",
    "checkpoint": "Checkpoints",
    "checkpoint/_contents": "What a checkpoint holds",
    "compat": "Programs for torch's FSDP",
    "optim": "Optimizers for sharded parameters",
    "tools": "Tools",
    "tools/command": "The command line",
    "tools/fitting": "Fits",
    "tools/machines": "Machines",
    "tools/planning": "Plans",
    "tools/timeline": "Timelines",
    "tools/tuning": "Recipes",
    "weights": "Weights for an engine",
}
"""The headings, by folder."""
PASSED_ON = """## Errors that pass on another text

Their words are those of another error, or are put together at run time. The function in the traceback tells
which one it is.
"""
FEWEST = 3
"""Words that depend on no case: a message with fewer cannot be found by them."""
WORDS = {
    "by": "fully_shard",
    "cls": "class",
    "comm": "communicator",
    "detach": "value",
    "dir": "folder",
    "doing": "this",
    "found": "what was given",
    "fqn": "name",
    "fqns": "name",
    "func": "function",
    "info": "argument",
    "nbytes": "bytes",
    "ndim": "dimensions",
    "numel": "elements",
    "p": "parameter",
    "param": "parameter",
    "placements": "placement",
    "str": "text",
    "strerror": "reason",
    "torchs": "torch's",
}
"""Words for what has short names in the source."""
CALLS = {"len": "number", "sum": "number", "format_bytes": "bytes", "name_of": "name", "describe": "module"}
"""Words for what a function returns, where that is not what it takes."""


@dataclass(frozen=True)
class Message:
    """One error or warning.

    Attributes:
        file: Relative to the package.
        place: The function, with the class around it.
        kind: The class of the error, or of the warning.
        text: What it says.
    """

    file: str
    place: str
    kind: str
    text: str

    @property
    def folder(self) -> str:
        """The folder of the package in which it is, "." for the package itself."""
        return Path(self.file).parent.as_posix()


class Reader(ast.NodeVisitor):
    """Collects the messages of one file."""

    def __init__(self, file: str, tree: ast.Module, errors: set[str]) -> None:
        self.messages: list[Message] = []
        self._file, self._errors = file, errors
        self._names: list[str] = []
        self._made = {node.name: told for node in tree.body if (told := returned_by(node)) is not None}
        top = (node for node in tree.body if isinstance(node, ast.Assign))
        self._texts: list[Callable[[], Texts]] = [cache(partial(assigned_in, [*top]))]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node, dict)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node, cache(partial(assigned_in, node.body)))

    def _inside(self, node: ast.ClassDef | ast.FunctionDef, texts: Callable[[], Texts]) -> None:
        self._names.append(node.name)
        self._texts.append(texts)
        self.generic_visit(node)
        self._names.pop()
        self._texts.pop()

    def visit_Call(self, node: ast.Call) -> None:
        called = last_name(node.func)
        if called in self._errors:
            self._add(called, node.args)
        elif called in WARNS:
            given = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "category")]
            self._add(last_name(given[0]) if given else "UserWarning", node.args)
        self.generic_visit(node)

    def _add(self, kind: str, arguments: list[ast.expr]) -> None:
        if arguments:
            given = next(filter(is_text, arguments), arguments[0])
            for text in self._told(given):
                self.messages.append(Message(self._file, ".".join(self._names), kind, text))

    def _told(self, given: ast.expr) -> Iterator[str]:
        """What a message may be: of a name, all texts that it is given."""
        found = self._known(given.id) if isinstance(given, ast.Name) else []
        for each in found or alternatives(given):
            yield " ".join(self._text(each).split())

    def _text(self, node: ast.expr) -> str:
        """What an expression says, with what depends on the case in braces."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) == "join"
            and isinstance(node.args[0], ast.List)
        ):
            return " ".join(map(self._text, node.args[0].elts))
        if isinstance(node, ast.FormattedValue):
            node = node.value
        if isinstance(node, ast.Call) and last_name(node.func) in self._made:
            return self._text(self._made[last_name(node.func)])
        known = self._known(node.id) if isinstance(node, ast.Name) else []
        return self._text(known[0]) if len(known) == 1 else f"{{{short(node)}}}"

    def _known(self, name: str) -> list[ast.expr]:
        return next((texts()[name] for texts in reversed(self._texts) if name in texts()), [])


def assigned_in(body: Sequence[ast.stmt]) -> Texts:
    """The texts that names get by assignment, with those in blocks."""
    found: Texts = {}
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Assign) and is_text(node.value):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in found:
            name, more = node.target.id, node.value
            found[name] = [ast.BinOp(each, ast.Add(), more) for each in found[name]]
    return found


def returned_by(node: ast.stmt) -> ast.expr | None:
    """The text that a function makes for messages, if it returns one text and nothing else."""
    if not isinstance(node, ast.FunctionDef):
        return None
    returns = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
    texts = [each for each in returns if is_text(each) and not isinstance(each, ast.Constant)]
    return texts[0] if len(texts) == 1 == len(returns) else None


def alternatives(node: ast.expr) -> list[ast.expr]:
    """What an expression may give where it chooses between two."""
    if isinstance(node, ast.IfExp):
        return [*alternatives(node.body), *alternatives(node.orelse)]
    return [node]


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a text, or is put together from one."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def short(node: ast.expr) -> str:
    """An expression as a reader needs it, without what only makes a text of it."""
    text = ast.unparse(node)
    for pattern, instead in PLAINER:
        text = re.sub(pattern, instead, text)
    return text if len(text) <= 60 else f"{text[:57].rstrip()}..."


def last_name(node: ast.expr) -> str:
    """The name of what is called, without what stands before it."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def error_classes(trees: dict[str, ast.Module]) -> set[str]:
    """Python's errors, and those that the package makes of them."""
    names = {name for name, each in vars(builtins).items() if isinstance(each, type)}
    errors = {name for name in names if issubclass(getattr(builtins, name), BaseException)}
    classes = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    before = 0
    while len(errors) > before:
        before = len(errors)
        errors |= {each.name for each in classes if any(last_name(base) in errors for base in each.bases)}
    return errors


@cache
def read() -> list[Message]:
    """All messages of the package, by folder and file."""
    files = sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name))
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in files}
    errors, found = error_classes(trees), []
    for file, tree in trees.items():
        reader = Reader(file, tree, errors)
        reader.visit(tree)
        found += reader.messages
    return list(dict.fromkeys(found))


def page() -> str:
    """The page: a heading for each folder, and one for each message, by which the site's search finds it."""
    lines, passed_on, taken = [HEAD], [PASSED_ON], Counter[str]()
    for folder, messages in groupby(read(), lambda each: each.folder):
        lines += [f"## {AREAS[folder]}", ""]
        for each in (each for each in messages if each.kind[0] in string.ascii_uppercase + "_"):
            told = f"`{each.kind}`, from {source_of(each)}"
            if fixed_words(each.text) < FEWEST:
                passed_on.append(f"- {shown(each.text, cell)} ({told})")
                continue
            anchor = anchor_of(each.text)
            taken[anchor] += 1
            anchor += f"-{taken[anchor]}" if taken[anchor] > 1 else ""
            link = f'<a class="headerlink" href="#{anchor}" title="Permanent link">&para;</a>'
            lines += [
                f'<h5 class="message" id="{anchor}">{shown(each.text, escape)}{link}</h5>',
                "",
                told,
                "",
            ]
    return "\n".join([*lines, *passed_on, ""])


def source_of(message: Message) -> str:
    """Where a message comes from, as a traceback tells it."""
    return f"`{message.place}` in `{message.file}`" if message.place else f"`{message.file}`"


def fixed_words(text: str) -> int:
    """How many words of a message are the same in all cases."""
    return len(re.findall(r"[A-Za-z]{2,}", CASE.sub(" ", text)))


def anchor_of(text: str) -> str:
    """A message's place on the page, from its first words."""
    return "-".join(re.findall(r"[a-z0-9]+", CASE.sub(" ", text).lower())[:9])


CASE = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")
"""What depends on the case; braces in it are those of texts within."""


def shown(text: str, written: Callable[[str], str]) -> str:
    """A message whose fixed words are written by a function; what depends on the case is slanted."""
    parts = CASE.split(text)  # texts, and between them what stood in braces
    marked = (f"<var>{plain(each)}</var>" if place % 2 else written(each) for place, each in enumerate(parts))
    return "".join(marked).replace("</var><var>", "</var> <var>")


def plain(case: str) -> str:
    """Words for an expression of the source, as a reader of the message needs them."""
    if case.startswith("class of "):
        return "class"
    try:
        return words_of(ast.parse(case.lstrip("*"), mode="eval").body)
    except SyntaxError:
        return "&hellip;"


def words_of(node: ast.expr) -> str:
    """Words for what an expression gives."""
    if isinstance(node, ast.Name):
        return constants().get(node.id) or words(node.id)
    if isinstance(node, ast.Attribute):
        return words(node.attr)
    if isinstance(node, ast.Subscript):
        return words_of(node.value)
    if isinstance(node, ast.BoolOp):
        return words_of(node.values[0])
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return "number"
    if isinstance(node, ast.IfExp):
        told = [each.value for each in (node.body, node.orelse) if isinstance(each, ast.Constant)]
        return " or ".join(str(each).strip() for each in told if each) or "&hellip;"
    if isinstance(node, ast.Call):
        called = last_name(node.func)
        if called in CALLS:
            return CALLS[called]
        return words_of(node.args[0]) if node.args else words(called)
    return "&hellip;"


def words(name: str) -> str:
    """A name of the source as words."""
    return WORDS.get(name) or " ".join(WORDS.get(part, part) for part in name.lower().split("_") if part)


@cache
def constants() -> dict[str, str]:
    """Texts and numbers that the package names once at the top of a file, by their names."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and target.id.strip("_").isupper():
                        found.setdefault(target.id.strip("_"), set()).add(str(node.value.value))
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def cell(text: str) -> str:
    """A text that Markdown shows as it stands; underscores inside of words it does."""
    return re.sub(r"[\\|<>*`]|(?<=\])\[|\b_|_\b", r"\\\g<0>", text)


def main() -> int:
    """Writes the page."""
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
