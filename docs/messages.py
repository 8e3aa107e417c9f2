"""Compares docs/messages.md with the source: each heading there begins a message of the package.

    python docs/messages.py

tells the headings that no text of the package begins with, each with the text that is most like it. People
write the page. A heading has the words of a message that are the same in every case, from its beginning on
and as far as needed to know it. What the message says of a case, braces in the source, is slanted there.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from html import unescape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdp_wrap"
TARGET = ROOT / "docs" / "messages.md"
OF_TORCH = [
    "distributed/distributed_c10d.py",
    "distributed/rendezvous.py",
    "distributed/run.py",
    "distributed/tensor/_dispatch.py",
]
FEWEST = 3
"""Words of a heading that depend on no case: fewer would fit too many texts."""
CASE = "\0"
_TELLS = re.compile(r"Error$|\bwarn(_caller)?$")
_BRACES = re.compile(r"\{[^{}]*\}")
_CASES = rf"{CASE}(?:[ .]?{CASE})*"
_HEADING = re.compile(r"^##### (?P<words>.+)$", re.M)
_SLANTED = re.compile(r"(?<![\\*])\*(?! )(.+?)(?<![\\ ])\*")
_ESCAPED = re.compile(r"\\([\\`*_{}\[\]()#+.!<>-])")


class Text(NamedTuple):
    """A text of the source, with `CASE` for what depends on the case.

    Attributes:
        file: Relative to the package.
        place: The function, with the class around it.
        told: Whether an error or a warning is made of it there.
        says: The text.
    """

    file: str
    place: str
    told: bool
    says: str


class Heading(NamedTuple):
    """A heading of the page: its line, and its words as on the page."""

    line: int
    words: str

    @property
    def plain(self) -> str:
        """Its words as a message has them, with `CASE` for those that are slanted."""
        return unescape(_ESCAPED.sub(r"\1", _SLANTED.sub(CASE, self.words)))

    def pattern(self) -> re.Pattern[str]:
        """What the beginnings of messages match; what is slanted stands for one or more cases.

        Both may have a case before the first words, of another text that the message begins with.
        """
        fixed = map(re.escape, self.plain.removeprefix(CASE).lstrip(" :").split(CASE))
        return re.compile(rf"(?:{_CASES}[ :]*)?{_CASES.join(fixed)}(?!\w)")


class Reader(ast.NodeVisitor):
    """Collects the texts of one file, but no docstrings."""

    def __init__(self, file: str) -> None:
        self.texts: list[Text] = []
        self._file = file
        self._names: list[str] = []
        self._tells = False

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_ClassDef(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        before = self._tells
        self._tells |= _TELLS.search(ast.unparse(node.func)) is not None
        self.generic_visit(node)
        self._tells = before

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._take(node)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._take(node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.generic_visit(part)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._take(node)

    def _take(self, node: ast.expr) -> None:
        says = " ".join(text_of(node).split()).lstrip("* ")  # some stand under a line of stars
        if says.strip(CASE):
            self.texts.append(Text(self._file, ".".join(self._names), self._tells, says))


def text_of(node: ast.expr) -> str:
    """What an expression says, with `CASE` for what depends on the case."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _BRACES.sub(CASE, node.value)  # of a text for format()
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return CASE


@cache
def read() -> list[Text]:
    """All texts of the package, by file."""
    return [text for path in sorted(PACKAGE.rglob("*.py")) for text in texts_in(path, PACKAGE)]


@cache
def read_torch() -> list[Text]:
    """Those of the files of torch whose messages the page has, too."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return [text for file in OF_TORCH for text in texts_in(folder / file, folder)]


def texts_in(path: Path, folder: Path) -> list[Text]:
    """The texts of one file, each once."""
    reader = Reader(path.relative_to(folder).as_posix())
    reader.visit(ast.parse(path.read_text("utf-8")))
    return list(dict.fromkeys(reader.texts))


def fixed_words(text: str) -> int:
    """How many words of a text are the same in all cases."""
    return len(re.findall(r"[A-Za-z]+", text.replace(CASE, " ")))


def headings(page: str) -> list[Heading]:
    """The headings of messages on a page."""
    matches = _HEADING.finditer(page)
    return [Heading(page.count("\n", 0, match.start()) + 1, match["words"].strip()) for match in matches]


def faults(page: str, texts: list[str]) -> Iterator[str]:
    """Tells the headings of a page that are no message: no text begins with them, or they have few words."""
    for heading in headings(page):
        where = f"docs/messages.md:{heading.line}: '{heading.words}'"
        if fixed_words(heading.plain) < FEWEST:
            yield f"{where} has too few words to know a message by: take more of the message"
        elif not any(map(heading.pattern().match, texts)):
            begins = [text[: len(heading.plain)] for text in texts]
            (like,) = get_close_matches(heading.plain, begins, 1, 0.0)
            told = like.replace(CASE, "*case*")
            yield f"{where} begins no message: mend it, or take the entry out. Most like it is '{told}'"


def main() -> int:
    """Tells what is wrong with the page."""
    wrong = [*faults(TARGET.read_text("utf-8"), [text.says for text in [*read(), *read_torch()]])]
    print("\n".join(wrong) or "every heading of docs/messages.md begins a message")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
