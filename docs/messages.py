"""Writes docs/messages.md: every error and warning of the package, by folder, with its place.

    python docs/messages.py

A place is a file and a function: lines would change with every edit. What a message says of a case stands in
braces.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
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

Every error and warning of the package, by folder, written by `docs/messages.py` from the source, not by hand.
A message says the rule, names what broke it, and says what to do. What depends on the case stands in
{braces}. Where the text is another error's, or is put together at run time, braces are all there is.
"""


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
        for each in found or [given]:
            yield " ".join(self._text(each).split())

    def _text(self, node: ast.expr) -> str:
        """What an expression says, with what depends on the case in braces."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        if isinstance(node, ast.FormattedValue):
            node = node.value
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
    return found


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
    """The page: a table for each folder."""
    lines = [HEAD]
    for folder, messages in groupby(read(), lambda each: each.folder):
        title = "`fsdp_wrap`" if folder == "." else f"`{folder}`"
        lines += [f"## {title}", "", "| place | kind | message |", "|---|---|---|"]
        for each in messages:
            place = f"`{Path(each.file).name}` {each.place}".rstrip()
            lines.append(f"| {place} | {each.kind} | {cell(each.text)} |")
        lines.append("")
    return "\n".join(lines)


def cell(text: str) -> str:
    """A text that Markdown shows as it stands; underscores inside of words it does."""
    return re.sub(r"[\\|<>*]|(?<=\])\[|\b_|_\b", r"\\\g<0>", text)


def main() -> int:
    """Writes the page."""
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
