"""Measures the source of the package; it prints where to look next, and judges nothing.

    python tests/tools/size.py [--statements]

Lines by folder, import circles, doubled class names, and what is long: classes, files and functions, in lines
of code (no docstrings, comments or blank lines). Last, the share of the statements in functions of `_runtime`
that a plain program enters: rank 0 of two builds the models of `walk.py`, with each of our front-ends, and
takes four steps. `--statements` lists those that it does not enter.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp_wrap"
FILES = sorted(PACKAGE.rglob("*.py"))

TOP, APART = "top level", ("_comm/shared_memory", "compat/_checking", "compat/_spmd_types")
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

LONG_CLASS, MANY_METHODS, LONG_FILE, LONG_FUNCTION = 250, 25, 400, 60
OF_TORCH = {"FullyShardedDataParallel", "FSDPModule"}
"""Classes whose methods are torch's public API."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


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


@cache
def code_lines(path: Path) -> set[int]:
    """Returns the lines of a file that hold code: no docstrings, no comments alone, none that are blank."""
    documented = _lines_in(docstrings(path))
    strings = _lines_in(
        node for node in ast.walk(parse(path)) if isinstance(node, (ast.Constant, ast.JoinedStr))
    )
    lines = enumerate(path.read_text().splitlines(), 1)
    held = {number for number, line in lines if number in strings or line.lstrip()[:1] not in ("", "#")}
    return held - documented


def lines_of(path: Path) -> tuple[int, int]:
    """Returns how many lines of a file hold code, and how many a docstring or nothing but a comment."""
    documented, code = _lines_in(docstrings(path)), code_lines(path)
    lines = enumerate(path.read_text().splitlines(), 1)
    comments = [
        number for number, line in lines if line.lstrip()[:1] == "#" and number not in code | documented
    ]
    return len(code), len(documented) + len(comments)


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
    by_folder: dict[str, list[list[Path]]] = {}
    for folder in dict.fromkeys(map(folder_of, FILES)):
        inside = [path for path in FILES if folder_of(path) == folder]
        graph = {path: {*_imports(path, modules)}.intersection(inside) - {path} for path in inside}
        reach = {path: _reachable(graph, path) for path in inside}
        seen: set[Path] = set()
        for path in inside:
            circle = [other for other in reach[path] if path in reach[other]]
            if circle and path not in seen:
                seen.update(circle)
                by_folder.setdefault(folder, []).append(sorted(circle))
    return by_folder


def _reachable(graph: Mapping[Path, Iterable[Path]], start: Path) -> set[Path]:
    reached: set[Path] = set()
    left = [start]
    while left:
        new = {*graph[left.pop()]} - reached
        reached |= new
        left += new
    return reached


def doubled_classes() -> dict[str, list[Path]]:
    """Returns the class names that stand in several files; a leading underscore makes no other name."""
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for path in FILES:
        names = {node.name.lstrip("_") for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)}
        for name in names:
            places[name].append(path)
    return {name: places[name] for name in sorted(places) if len(places[name]) > 1}


def _length(path: Path, node: ast.stmt) -> int:
    return len(code_lines(path).intersection(range(node.lineno, (node.end_lineno or 0) + 1)))


def large() -> Iterator[str]:
    """Yields classes, files and functions that are longer than they should be, each as a line of text."""
    for path in FILES:
        if len(code_lines(path)) > LONG_FILE:
            yield f"{_short(path)}: {len(code_lines(path))} lines"
        for node in ast.walk(parse(path)):
            if isinstance(node, Function) and _length(path, node) > LONG_FUNCTION:
                yield f"{_short(path)}: {node.name}(): {_length(path, node)} lines"
            elif isinstance(node, ast.ClassDef) and node.name not in OF_TORCH:
                methods = sum(isinstance(member, Function) for member in node.body)
                if methods > MANY_METHODS or _length(path, node) > LONG_CLASS:
                    yield f"{_short(path)}: {node.name}: {_length(path, node)} lines, {methods} methods"


class Statements(NamedTuple):
    """The statements in a function, each as the lines that it begins with; those nested in it are its own."""

    path: Path
    name: str
    headers: list[range]

    def missed(self, entered: set[int]) -> list[int]:
        """Returns the first lines of the statements that a program does not enter."""
        return sorted(header.start for header in self.headers if entered.isdisjoint(header))


def _header(statement: ast.stmt) -> range:
    """Returns the lines that belong to a statement, and not to the statements in it."""
    inner = [node.lineno for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
    cases = [case.pattern.lineno for case in getattr(statement, "cases", ())]
    end = min([*inner, *cases], default=(statement.end_lineno or 0) + 1)
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", ()))])
    return range(first, max(end, statement.lineno + 1))


def statements(folder: str) -> list[Statements]:
    """Returns the statements in the functions of a folder, docstrings and declarations of names aside."""
    all_statements = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        documented = {node.lineno for node in docstrings(path)}
        inside: dict[ast.stmt, ast.AST] = {}
        for function in filter(lambda node: isinstance(node, Function), ast.walk(parse(path))):
            headers = []
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and node is not function and node not in inside:
                    inside[node] = function
                    if node.lineno not in documented and not isinstance(node, ast.Global | ast.Nonlocal):
                        headers.append(_header(node))
            if headers:
                all_statements.append(Statements(path, getattr(function, "name", ""), headers))
    return all_statements


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--statements", action="store_true", help="list what a plain program does not enter")
    options = parser.parse_args()
    print(f"{'folder':22}{'code':>8}{'docstrings and comments':>26}{'ratio':>8}")
    for folder, (code, text) in lines_by_folder().items():
        print(f"{folder:22}{code:8}{text:26}{text / code:8.2f}")
    print("\nimport circles inside a folder, imports for types counted")
    for folder, in_folder in circles().items():
        print(f"  {folder}: {len(in_folder)} circles of {sum(map(len, in_folder))} files")
        for circle in in_folder:
            print("   ", ", ".join(_short(path) for path in circle))
    doubled = doubled_classes()
    print(f"\nclass names in several files: {len(doubled)}")
    for name, paths in doubled.items():
        print(f"  {name}: {', '.join(map(_short, paths))}")
    print(f"\nlong: classes above {LONG_CLASS} lines or {MANY_METHODS} methods (torch's public API apart),")
    print(f"files above {LONG_FILE} lines, functions above {LONG_FUNCTION}")
    for line in large():
        print(f"  {line}")
    _print_share(options.statements)


def _print_share(listed: bool) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.walk import lines_entered  # which needs torch

    entered, all_of_them = lines_entered("_runtime"), statements("_runtime")
    missed = [function.missed(entered.get(_short(function.path), set())) for function in all_of_them]
    number = sum(len(function.headers) for function in all_of_them)
    taken = number - sum(map(len, missed))
    print(f"\nstatements of _runtime that a plain program enters: {taken} of {number}, {taken / number:.1%}")
    for function, lines in zip(all_of_them, missed):
        if listed and lines:
            print(f"  {_short(function.path)}: {function.name}: lines {', '.join(map(str, lines))}")


def _short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


if __name__ == "__main__":
    main()
