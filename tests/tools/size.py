"""Measures the source of the package: lines by folder, import circles, doubled class names, docstrings.

    python tests/tools/size.py [--docstrings]

`--docstrings` lists the docstrings with a sentence that begins with What, Who, Whose, That, Those, As, Of or
By which.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp_wrap"
FILES = sorted(PACKAGE.rglob("*.py"))

TOP, APART = "top level", ("_comm/shared_memory", "compat/_checking", "compat/_spmd_types", "tools/tuning")
NOT_CORE = {
    "checkpoint",
    "optim",
    "compat",
    "tools",
    "weights",
    "_activations",
    "_compression",
    "_state_over_replicas",
    "_uneven",
    "_reproducible",
    "_values",
    "_writer_process",
    *APART,
}

_BEGINNING = re.compile(
    r"(?:\A|(?<=[.!?])\s+|\n\s*\n\s*|^\s*(?:[-*]|\w+:)\s+)"
    r"[\"'`(*]*(?:What|Who|Whose|That|Those|As|Of|By\s+which)\b",
    re.MULTILINE,
)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def folder_of(path: Path) -> str:
    """Returns what a file is counted as: a folder at the top of the package, or a part that stands apart."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if "/".join(parts[:2]) in APART:
        return "/".join(parts[:2])
    return parts[0] if len(parts) > 1 else TOP


@cache
def docstrings(path: Path) -> list[ast.Constant]:
    """Returns the docstrings of a file, those of attributes as well."""
    return [
        node.value
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def lines_of(path: Path) -> tuple[int, int]:
    """Returns how many lines of a file hold code, and how many a docstring or nothing but a comment."""
    documented = _lines_in(docstrings(path))
    strings = _lines_in(
        node for node in ast.walk(parse(path)) if isinstance(node, (ast.Constant, ast.JoinedStr))
    )
    code, comments = 0, 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        begin = line.lstrip()[:1]
        if number not in documented:
            code += number in strings or begin not in ("", "#")
            comments += number not in strings and begin == "#"
    return code, len(documented) + comments


def _lines_in(nodes: Iterable[ast.expr]) -> set[int]:
    return {number for node in nodes for number in range(node.lineno, (node.end_lineno or 0) + 1)}


def lines_by_folder() -> dict[str, tuple[int, int]]:
    """Returns lines of code, and of docstrings and comments, by folder; `core` and `all` are sums."""
    code: Counter[str] = Counter()
    text: Counter[str] = Counter()
    for path in FILES:
        folder = folder_of(path)
        of_file = lines_of(path)
        for name in (folder, "all", *(["core"] if folder not in NOT_CORE else [])):
            code[name] += of_file[0]
            text[name] += of_file[1]
    names = [*sorted({*code} - {"core", "all"}), "core", "all"]
    return {name: (code[name], text[name]) for name in names}


def _modules() -> dict[str, Path]:
    names = (".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, FILES)}


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[Path]:
    """Yields the files of the package that a file imports, also for types alone."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wholes = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [whole if whole in modules else node.module or "" for whole in wholes]
        else:
            continue
        yield from (modules[name] for name in names if name in modules)


def circles() -> dict[str, list[list[Path]]]:
    """Returns the files of each folder that import each other in a circle, one list for each circle."""
    modules = _modules()
    found: dict[str, list[list[Path]]] = {}
    for folder in dict.fromkeys(map(folder_of, FILES)):
        inside = [path for path in FILES if folder_of(path) == folder]
        graph = {path: {*_imports(path, modules)}.intersection(inside) - {path} for path in inside}
        reach = {path: _reachable(graph, path) for path in inside}
        seen: set[Path] = set()
        for path in inside:
            circle = [other for other in reach[path] if path in reach[other]]
            if circle and path not in seen:
                seen.update(circle)
                found.setdefault(folder, []).append(sorted(circle))
    return found


def _reachable(graph: Mapping[Path, Iterable[Path]], start: Path) -> set[Path]:
    found: set[Path] = set()
    left = [start]
    while left:
        new = {*graph[left.pop()]} - found
        found |= new
        left += new
    return found


def doubled_classes() -> dict[str, list[Path]]:
    """Returns the class names that stand in several files; a leading underscore makes no other name."""
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for path in FILES:
        names = {node.name.lstrip("_") for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)}
        for name in names:
            places[name].append(path)
    return {name: places[name] for name in sorted(places) if len(places[name]) > 1}


def begins_obscurely(text: str) -> re.Match[str] | None:
    """Finds the first sentence of a docstring that begins with one of these words."""
    return _BEGINNING.search(text)


def obscure_docstrings() -> list[tuple[Path, int, str]]:
    """Returns file, line and sentence of the docstrings that begin one with What, Who and so on."""
    found = []
    for path in FILES:
        for each in docstrings(path):
            text = str(each.value)
            match = begins_obscurely(text)
            if match is not None:
                line = each.lineno + text.count("\n", 0, match.end())
                sentence = re.split(r"(?<=[.!?])\s|\n\s*\n", text[match.start() :].lstrip(), maxsplit=1)[0]
                found.append((path, line, " ".join(sentence.split())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--docstrings", action="store_true", help="list the docstrings that begin obscurely")
    options = parser.parse_args()
    lines, obscure = lines_by_folder(), obscure_docstrings()
    print(f"{'folder':22}{'code':>8}{'docstrings and comments':>26}{'ratio':>8}")
    for folder, (code, text) in lines.items():
        print(f"{folder:22}{code:8}{text:26}{text / code:8.2f}")
    print("\nimport circles inside a folder, imports for types counted")
    for folder, found in circles().items():
        print(f"  {folder}: {len(found)} circles of {sum(map(len, found))} files")
        for circle in found:
            print("   ", ", ".join(_short(path) for path in circle))
    doubled = doubled_classes()
    print(f"\nclass names in several files: {len(doubled)}")
    for name, paths in doubled.items():
        print(f"  {name}: {', '.join(map(_short, paths))}")
    number = sum(len(docstrings(path)) for path in FILES)
    print(f"\ndocstrings that begin a sentence with What, Who, That, As, Of ...: {len(obscure)} of {number}")
    for path, line, sentence in obscure if options.docstrings else ():
        print(f"  {_short(path)}:{line}: {sentence}")


def _short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


if __name__ == "__main__":
    main()
