"""What the tests notice: a seeded set of small faults in the core of the package, and which tests name each.

    python tests/tools/mutants.py list
    python tests/tools/mutants.py run RECORD [--tier slow] [--before OTHER]

`run` judges the commit that is checked out, in clones of it:

1. The tier runs once with a mark before every statement that has a mutant: which tests reach it, and how long
   each test takes.
2. Each mutant meets a few short tests that reach it, from as many files as there are.
3. What lived through that is put into one clone all together, in which the whole tier runs. Each of these
   mutants then meets, alone, the tests that failed there and reach it.

RECORD is a file of JSON, one line a mutant: its name, its tier, the test that failed or null. It is continued
if it exists. `--before` names another record, whose tests are tried first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("_core", "_comm", "_params", "_runtime", "_state", "checkpoint")
NUMBER, SEED = 160, 36
AT_A_TIME = 2
SECONDS = 25.0
"""Of the tests that a mutant meets first."""
LONGEST = 400.0
"""Seconds after which a mutant that runs has stopped the tests, and so shows."""

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "+"}
REACHED = """
import os

_FILE, _seen = os.environ.get("MUTANTS_REACHED"), set()


def reached(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if _FILE and test and (number, test) not in _seen:
        _seen.add((number, test))
        with open(_FILE, "a") as file:
            file.write(f"{number} {test}\\n")
"""


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a file: the text between two offsets becomes another."""

    path: str
    operator: str
    where: str
    """The function, by its qualified name."""
    line: int
    """Of the statement before which a mark can stand."""
    begin: int
    end: int
    old: str
    new: str
    number: int
    """Among those of the file that read the same."""

    @cached_property
    def name(self) -> str:
        """It stays the same while lines are added elsewhere in the file."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.path}:{self.where}: {self.operator}: {' '.join(self.old.split())[:80]}{again}"


class _Sites(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        lines = self.text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines
        self._scope: list[str] = []
        self._statement: list[int] = []
        self._same: Counter[tuple[str, str, str]] = Counter()
        self.found: list[Mutant] = []
        self.visit(ast.parse(self.text))

    def _offset(self, line: int, column: int) -> int:
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def _span(self, node: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        end = last or node
        return (
            self._offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._offset(end.end_lineno, end.end_col_offset),  # type: ignore[attr-defined]
        )

    def _add(self, operator: str, span: tuple[int, int], new: str) -> None:
        if self._statement:
            old = self.text[slice(*span)]
            where = ".".join(self._scope)
            number = self._same[where, operator, old]
            self._same[where, operator, old] += 1
            self.found.append(
                Mutant(self.path, operator, where, self._statement[-1], *span, old, new, number)
            )

    def _source(self, node: ast.AST) -> str:
        return self.text[slice(*self._span(node))]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._statement = self._statement, []
        self._scope.append(node.name)
        self._body(node.body)
        self._scope.pop()
        self._statement = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._statement = self._statement, []
        self._scope.append(node.name)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.visit(statement)
        self._scope.pop()
        self._statement = outer

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for number, statement in enumerate(body):
            is_elif = self._lines[statement.lineno - 1].lstrip().startswith("elif ")
            line = self._statement[-1] if is_elif else statement.lineno
            self._statement.append(line)
            if number and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self._swap(body[number - 1], statement)
            self.visit(statement)
            self._statement.pop()

    def _swap(self, first: ast.stmt, second: ast.stmt) -> None:
        simple = ast.Expr | ast.Assign | ast.AugAssign
        if not (isinstance(first, simple) and isinstance(second, simple)):
            return
        calls = [
            one for one in (first, second) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
        ]
        if not calls or any(isinstance(getattr(one, "value", None), ast.Constant) for one in (first, second)):
            return
        between = self.text[self._span(first)[1] : self._span(second)[0]]
        self._statement.append(first.lineno)
        self._add("order", self._span(first, second), self._source(second) + between + self._source(first))
        self._statement.pop()

    def generic_visit(self, node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            values = value if isinstance(value, list) else [value]
            if values and all(isinstance(one, ast.stmt) for one in values):
                self._body(values)
                continue
            for one in values:
                if isinstance(one, ast.AST):
                    self.visit(one)

    def _negate(self, test: ast.expr) -> None:
        self._add("condition", self._span(test), f"(not ({self._source(test)}))")

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("call", self._span(node), "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        other = COMPARED.get(type(node.ops[0]))
        if other and len(node.ops) == 1:
            left, right = self._source(node.left), self._source(node.comparators[0])
            self._add("comparison", self._span(node), f"({left}) {other} ({right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = COMPUTED.get(type(node.op))
        texts = [
            one for one in (node.left, node.right) if isinstance(one, ast.Constant | ast.JoinedStr | ast.List)
        ]
        if other and not any(not isinstance(getattr(one, "value", None), int) for one in texts):
            left, right = self._source(node.left), self._source(node.right)
            self._add("arithmetic", self._span(node), f"(({left}) {other} ({right}))")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", self._span(node), str(node.value + 1))

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leaves the words of errors alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leaves texts alone."""


def mutants(number: int = NUMBER, seed: int = SEED) -> list[Mutant]:
    """Draws as many mutants of each operator, not two of one statement."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / "fsdp_wrap" / folder).rglob("*.py")):
            for mutant in _Sites(path).found:
                found[mutant.operator].append(mutant)
    generator = random.Random(seed)
    for several in found.values():
        generator.shuffle(several)
    chosen: dict[tuple[str, int], Mutant] = {}
    while len(chosen) < number:
        for operator in sorted(found):
            mutant = found[operator].pop()
            while (mutant.path, mutant.line) in chosen:
                mutant = found[operator].pop()
            chosen[mutant.path, mutant.line] = mutant
    return [*chosen.values()][:number]


class Clone:
    """A checkout of its own, in which faults can be put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)

    def mutate(self, several: Iterable[Mutant]) -> None:
        by_file = defaultdict(list)
        for mutant in several:
            by_file[mutant.path].append(mutant)
        for path, here in by_file.items():
            text = (ROOT / path).read_text(encoding="utf-8")
            for mutant in sorted(here, key=lambda one: -one.begin):
                text = text[: mutant.begin] + mutant.new + text[mutant.end :]
            compile(text, path, "exec")
            (self.folder / path).write_text(text, encoding="utf-8")

    def mark(self, several: Sequence[Mutant]) -> None:
        """Puts a mark before each mutant's statement."""
        (self.folder / "fsdp_wrap" / "_reached.py").write_text(REACHED)
        by_file = defaultdict(list)
        for number, mutant in enumerate(several):
            by_file[mutant.path].append((mutant.line, number))
        for path, marks in by_file.items():
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
            for line, number in sorted(marks, reverse=True):
                indent = lines[line - 1][: -len(lines[line - 1].lstrip())]
                lines.insert(line - 1, f"{indent}_reached({number})\n")
            future = "from __future__ import annotations\n"
            at = lines.index(future) + 1 if future in lines else _after_docstring(lines)
            lines.insert(at, "from fsdp_wrap._reached import reached as _reached\n")
            text = "".join(lines)
            compile(text, path, "exec")
            (self.folder / path).write_text(text, encoding="utf-8")

    def restore(self) -> None:
        subprocess.run(["git", "checkout", "-q", "."], cwd=self.folder, check=True)

    def pytest(
        self,
        *arguments: str,
        log: Path,
        limit: float | None = None,
        reached: str = "",
    ) -> int | None:
        """Runs tests; returns the exit status, None if that took longer than the limit."""
        settings = {**os.environ, "PYTHONPATH": str(self.folder), "FSDP_WRAP_DRAW": "mutants"}
        if reached:
            settings["MUTANTS_REACHED"] = reached
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=self.folder, env=settings, stdout=file, stderr=file)
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return None


def _after_docstring(lines: Sequence[str]) -> int:
    first = ast.parse("".join(lines)).body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or 0) if is_docstring else 0


def failures(log: Path) -> list[str]:
    """The tests that pytest's summary names as failed."""
    words = ("FAILED ", "ERROR ")
    lines = log.read_text(errors="replace").splitlines()
    return [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(words)]


@dataclass
class Reach:
    """Which tests reach which mutant, and the seconds of each test."""

    tests: dict[int, set[str]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Reach:
        tests = defaultdict(set)
        for line in (folder / "reached").read_text().splitlines():
            number, _, test = line.partition(" ")
            tests[int(number)].add(test)
        seconds: dict[str, float] = defaultdict(float)
        for line in (folder / "log").read_text(errors="replace").splitlines():
            words = line.split(maxsplit=2)
            if len(words) == 3 and words[1] in ("call", "setup") and words[0].endswith("s"):
                seconds[words[2]] += float(words[0][:-1])
        return cls(tests, seconds)

    def first(self, number: int, of: Iterable[str] | None = None) -> list[str]:
        """A few short tests: the shortest of each file, then of each function, while there is time."""
        reaching = self.tests.get(number, set())
        if of is not None:
            reaching = reaching & set(of)
        by_time = sorted(reaching, key=lambda test: self.seconds.get(test, 0.0))
        for part in ("::", "["):
            shortest: dict[str, str] = {}
            for test in by_time:
                shortest.setdefault(test.partition(part)[0], test)
            by_time = [*shortest.values(), *(test for test in by_time if test not in shortest.values())]
        chosen: list[str] = []
        spent = 0.0
        for test in by_time[:60]:
            spent += self.seconds.get(test, 0.0)
            if chosen and spent > SECONDS:
                break
            chosen.append(test)
        return chosen


class Run:
    """Mutants against a tier."""

    def __init__(self, record: Path, tier: str, before: dict[str, str], scratch: Path) -> None:
        self._record, self._tier, self._before, self._scratch = record, tier, before, scratch
        self._mutants = mutants()
        self._clones: SimpleQueue[Clone] = SimpleQueue()
        for number in range(AT_A_TIME):
            self._clones.put(Clone(scratch / f"clone{number}"))

    def everything(self) -> None:
        known = read(self._record)
        left = [n for n, one in enumerate(self._mutants) if known.get(one.name) is None]
        reach = self._reach()
        left = self._meet({n: [*self._earlier(n), *reach.first(n)] for n in left})
        print(f"{len(left)} live through the first tests", flush=True)
        failed = self._all_together(left)
        self._meet({n: reach.first(n, failed) for n in left}, last=True)

    def _earlier(self, number: int) -> list[str]:
        test = self._before.get(self._mutants[number].name)
        return [test] if test and (ROOT / test.partition("::")[0]).exists() else []

    def _reach(self) -> Reach:
        folder = ROOT / ".mutants" / self._tier
        if not (folder / "done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            clone = Clone(self._scratch / "marked")
            clone.mark(self._mutants)
            reached = str(folder / "reached")
            clone.pytest(
                "-m", self._marker, "-n", "2", "--durations=0", "-vv", log=folder / "log", reached=reached
            )
            (folder / "done").touch()
        return Reach.read(folder)

    @property
    def _marker(self) -> str:
        return "slow" if self._tier == "slow" else "not slow"

    def _meet(self, tests: dict[int, list[str]], last: bool = False) -> list[int]:
        """Lets each mutant meet its tests, alone; returns which live."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            killers = pool.map(lambda number: self._meet_one(number, tests[number], last), tests)
            return [number for number, killer in zip(tests, killers) if killer is None]

    def _meet_one(self, number: int, tests: list[str], last: bool) -> str | None:
        mutant, killer = self._mutants[number], None
        if tests:
            clone = self._clones.get()
            clone.mutate([mutant])
            chosen, log = self._scratch / f"tests{number}", self._scratch / f"log{number}"
            chosen.write_text("\n".join(dict.fromkeys(tests)))
            marker = ("-m", "slow or not slow", f"@{chosen}")
            status = clone.pytest("-x", *marker, log=log, limit=LONGEST)
            if status not in (0, 5):
                killer = (failures(log) or ["it stops the tests" if status is None else "no test can start"])[
                    0
                ]
            clone.restore()
            self._clones.put(clone)
        if killer or last:
            self._note(mutant, killer)
        return killer

    def _note(self, mutant: Mutant, killer: str | None) -> None:
        with self._record.open("a") as file:
            file.write(json.dumps({"mutant": mutant.name, "tier": self._tier, "test": killer}) + "\n")
        print(f"{mutant.name}: {killer}", flush=True)

    def _all_together(self, several: Sequence[int]) -> list[str]:
        clone = self._clones.get()
        clone.mutate(self._mutants[n] for n in several)
        log = self._scratch / "together"
        clone.pytest("-m", self._marker, "-n", "2", log=log)
        clone.restore()
        self._clones.put(clone)
        return failures(log)


def read(record: Path) -> dict[str, str]:
    """The killers by mutant; the last line about one counts."""
    lines = record.read_text().splitlines() if record.exists() else []
    entries = [json.loads(line) for line in lines]
    return {one["mutant"]: one["test"] for one in entries if one["test"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the mutants")
    run = commands.add_parser("run", help="let them meet the tests")
    run.add_argument("record", type=Path)
    run.add_argument("--tier", choices=["fast", "slow"], default="fast")
    run.add_argument("--before", type=Path)
    options = parser.parse_args()
    if options.command == "list":
        for mutant in mutants():
            print(f"{mutant.name}  ->  {' '.join(mutant.new.split())[:80]}")
        return
    before = read(options.before) if options.before else {}
    with tempfile.TemporaryDirectory() as scratch:
        Run(options.record, options.tier, before, Path(scratch)).everything()


if __name__ == "__main__":
    main()
