"""What the tests notice: a seeded set of small faults in the core, and the test that names each.

    python tests/tools/mutants.py list
    python tests/tools/mutants.py run [--tier slow] [--left] [--only PART_OF_A_NAME]

`run` judges the commit that is checked out, in clones of it:

1. The tier runs once with a mark before every statement that has a mutant: which tests reach it, and how long
   each test takes.
2. Each mutant meets the test that noticed it last time, a few tests that reach it, and if it lives, more.
3. The tests that noticed mutants run once without: what fails then has noticed nothing.

`mutants.json` has the outcome of each mutant: the tier and the test that noticed it, or null.
Those that no test can tell from the original are set aside there by hand, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("mutants.json")
DRAW = "FSDP_WRAP_DRAW"
FOLDERS = (
    "_core",
    "_comm",
    "_params",
    "_runtime",
    "_batching",
    "_checks",
    "_custom_comms",
    "_offloading.py",
    "_state",
    "checkpoint",
)
NUMBER, SEED = 160, 36
AT_A_TIME = 2
FIRST, MOST, SECONDS = 6, 80, 60.0
"""How many tests a mutant meets alone at first, and in all if it lives; and the seconds of these."""
STOPS, STARTS_NOT = "(the tests do not end)", "(no test can start)"
LONGEST, LONGER = 150.0, 600.0
"""Seconds after which tests seem stopped, and when run again, are: then the mutant shows."""

COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "+"}
REACHED = """
import os
import re

_FILE, _seen = os.environ.get("MUTANTS_REACHED"), set()


def reached(number):
    # Ranks have it without the phase.
    test = re.sub(r" \\((setup|call|teardown)\\)$", "", os.environ.get("PYTEST_CURRENT_TEST", ""))
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
        """A name that stays the same while lines are added elsewhere in the file."""
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
        self.mutants: list[Mutant] = []
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
            self.mutants.append(
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

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

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


def mutants() -> list[Mutant]:
    """Those of the record that are still there, and as many others as are missing of each operator."""
    sites = [
        mutant
        for folder in FOLDERS
        for path in sorted((ROOT / "fsdp_wrap" / folder).rglob("*.py")) or [ROOT / "fsdp_wrap" / folder]
        for mutant in _Sites(path).mutants
    ]
    recorded = Record().names
    # By a checksum, so that the draw stays the same while other lines of the package change.
    sites.sort(key=lambda one: (one.name not in recorded, zlib.crc32(f"{SEED} {one.name}".encode())))
    operators = sorted({mutant.operator for mutant in sites})
    chosen: dict[tuple[str, int], Mutant] = {}
    counts = Counter[str]()
    for mutant in sites:
        place = mutant.path, mutant.line
        if place not in chosen and counts[mutant.operator] < -(-NUMBER // len(operators)):
            chosen[place] = mutant
            counts[mutant.operator] += 1
    # Marks have numbers that later runs read: the order does not tell what is on record by then.
    return sorted(chosen.values(), key=lambda one: one.name)


def mutated(text: str, several: Iterable[Mutant]) -> str:
    """The text of a file with mutants of it."""
    for mutant in sorted(several, key=lambda one: -one.begin):
        text = text[: mutant.begin] + mutant.new + text[mutant.end :]
    return text


def marked(text: str, several: Mapping[int, Mutant]) -> str:
    """The text of a file with a mark before the statement of each mutant of it."""
    lines = text.splitlines(keepends=True)
    for number, mutant in sorted(several.items(), key=lambda item: -item[1].line):
        line = lines[mutant.line - 1]
        indent = line[: len(line) - len(line.lstrip())]
        lines.insert(mutant.line - 1, f"{indent}_reached({number})\n")
    future = "from __future__ import annotations\n"
    at = lines.index(future) + 1 if future in lines else _after_docstring(lines)
    lines.insert(at, "from fsdp_wrap._reached import reached as _reached\n")
    return "".join(lines)


def _after_docstring(lines: Sequence[str]) -> int:
    first = ast.parse("".join(lines)).body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (first.end_lineno or 0) if is_docstring else 0


class Clone:
    """A checkout of its own, in which faults can be put."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)

    def mutate(self, several: Sequence[Mutant]) -> None:
        for path in {mutant.path for mutant in several}:
            here = [mutant for mutant in several if mutant.path == path]
            (self._folder / path).write_text(mutated(_source_of(path), here), encoding="utf-8")

    def mark(self, several: Sequence[Mutant]) -> None:
        (self._folder / "fsdp_wrap" / "_reached.py").write_text(REACHED)
        for path in {mutant.path for mutant in several}:
            here = {number: mutant for number, mutant in enumerate(several) if mutant.path == path}
            (self._folder / path).write_text(marked(_source_of(path), here), encoding="utf-8")

    def restore(self) -> None:
        subprocess.run(["git", "checkout", "-q", "."], cwd=self._folder, check=True)

    def pytest(self, *arguments: str, log: Path, limit: float | None = None, **variables: str) -> int | None:
        """Runs tests; returns the exit status, None if that took longer than the limit."""
        settings = {**os.environ, "PYTHONPATH": str(self._folder), DRAW: "mutants", **variables}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=self._folder, env=settings, stdout=file, stderr=file)
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return None


def _source_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def failures(log: Path) -> list[str]:
    """The tests that pytest's summary names as failed."""
    lines = log.read_text(errors="replace").splitlines()
    told = (line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
    # Lines of a captured log can begin with ERROR, too.
    return [line.split(" - ")[0] for line in told if line.startswith("tests/")]


@dataclass
class Reach:
    """Which tests reach which mutant, and the seconds of each test."""

    tests: dict[int, set[str]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, reached: Path, log: Path) -> Reach:
        tests = defaultdict(set)
        for line in reached.read_text().splitlines():
            number, _, test = line.partition(" ")
            tests[int(number)].add(test)
        seconds: dict[str, float] = defaultdict(float)
        for words in (line.split(maxsplit=2) for line in log.read_text(errors="replace").splitlines()):
            if len(words) == 3 and words[1] in ("call", "setup") and words[0].endswith("s"):
                seconds[words[2]] += float(words[0][:-1])
        return cls(tests, seconds)

    def few(self, number: int, mutant: Mutant, of: Iterable[str]) -> list[str]:
        """Some tests that reach a mutant, each of another function, while there is time.

        Those of the folder of tests about its folder come first, and of these those of about a second:
        shorter ones see little of what they reach.
        """
        home = f"tests/{Path(mutant.path).parts[1].strip('_')}/"
        tests = sorted(
            self.tests.get(number, set()) & {*of},
            key=lambda one: (not one.startswith(home), abs(math.log(self.seconds.get(one, 0.0) + 0.01))),
        )
        first: dict[str, str] = {}
        for test in tests:
            first.setdefault(test.partition("[")[0], test)
        chosen = {*first.values()}
        tests = [*first.values(), *(test for test in tests if test not in chosen)]
        spent = accumulate(self.seconds.get(test, 0.0) for test in tests)
        return [test for test, until in zip(tests[:MOST], spent) if until < SECONDS] or tests[:1]


class Record:
    """The outcomes of all mutants, in a file."""

    def __init__(self) -> None:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else []
        self._known = {one["mutant"]: one for one in known}

    @property
    def names(self) -> set[str]:
        """The names of all mutants that it knows."""
        return {*self._known}

    def keep_only(self, several: Iterable[Mutant]) -> None:
        """Forgets those that are gone."""
        names = {mutant.name for mutant in several}
        self._known = {name: one for name, one in self._known.items() if name in names}

    def is_set_aside(self, mutant: Mutant) -> bool:
        return "reason" in self._known.get(mutant.name, {})

    def tier_of(self, mutant: Mutant) -> str | None:
        """The tier that noticed it last time."""
        tier: str | None = self._known.get(mutant.name, {}).get("tier")
        return tier

    def test_of(self, mutant: Mutant) -> str | None:
        """The test that noticed it last time."""
        test: str | None = self._known.get(mutant.name, {}).get("test")
        return test

    def note(self, mutant: Mutant, tier: str, test: str | None) -> None:
        print(f"{mutant.name}: {test}", flush=True)
        before = self._known.get(mutant.name, {})
        if test and before.get("test") == test:  # which is of the other tier, perhaps
            tier = before["tier"]
        self._known[mutant.name] = {"mutant": mutant.name, "tier": tier if test else None, "test": test}
        entries = [self._known[name] for name in sorted(self._known)]
        RECORD.write_text(json.dumps(entries, indent=1) + "\n")


class Run:
    """Mutants against a tier."""

    def __init__(self, tier: str, left: bool, only: str, scratch: Path) -> None:
        self._tier, self._scratch, self._record = tier, scratch, Record()
        self._mutants = mutants()
        self._record.keep_only(self._mutants)
        self._judged = [
            number
            for number, mutant in enumerate(self._mutants)
            if only in mutant.name and self._is_judged(mutant, left)
        ]
        self._clones: SimpleQueue[Clone] = SimpleQueue()
        for number in range(AT_A_TIME):
            self._clones.put(Clone(scratch / f"clone{number}"))

    def _is_judged(self, mutant: Mutant, left: bool) -> bool:
        """The slow tier judges what the fast one does not notice."""
        tier = self._record.tier_of(mutant)
        noticed = tier is not None if left else (self._tier, tier) == ("slow", "fast")
        return not noticed and not self._record.is_set_aside(mutant)

    def everything(self) -> None:
        reach, there = self._reach(), self._collected()
        left = self._meet({n: self._last_time(n, there) for n in self._judged})
        chosen = {n: reach.few(n, self._mutants[n], there) for n in left}
        for part in (slice(0, FIRST), slice(FIRST, None)):
            left = self._meet({n: chosen[n][part] for n in left})
            print(f"{len(left)} are left", flush=True)
        for number in left:
            self._record.note(self._mutants[number], self._tier, None)
        self._confirm(there)

    def _confirm(self, there: set[str]) -> None:
        """Takes back what tests noticed that fail without a mutant, too: on a busy machine, say."""
        noticed = {n: test for n in self._judged if (test := self._record.test_of(self._mutants[n])) in there}
        clone, chosen, log = self._clones.get(), self._scratch / "noticed", self._scratch / "confirmed"
        chosen.write_text("\n".join(dict.fromkeys(noticed.values())))
        clone.pytest("-m", "slow or not slow", f"@{chosen}", log=log)
        self._clones.put(clone)
        failed = {*failures(log)}
        for number in (n for n, test in noticed.items() if test in failed):
            self._record.note(self._mutants[number], self._tier, None)

    def _collected(self) -> set[str]:
        """The names of all tests that can be run by name."""
        clone, log = self._clones.get(), self._scratch / "collected"
        clone.pytest("--collect-only", "-m", "slow or not slow", log=log, FSDP_WRAP_THOROUGH="1")
        self._clones.put(clone)
        return {line for line in log.read_text().splitlines() if "::" in line}

    def _last_time(self, number: int, there: set[str]) -> list[str]:
        test = self._record.test_of(self._mutants[number])
        return [test] if test in there else []

    def _reach(self) -> Reach:
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        folder = ROOT / ".mutants" / f"{commit}-{self._tier}"
        reached, log, done = folder / "reached", folder / "log", folder / "done"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            clone = Clone(self._scratch / "marked")
            clone.mark(self._mutants)
            clone.pytest(
                "-m", self._marker, "-n", "2", "--durations=0", "-vv", log=log, MUTANTS_REACHED=str(reached)
            )
            done.touch()
        return Reach.read(reached, log)

    @property
    def _marker(self) -> str:
        return "slow" if self._tier == "slow" else "not slow"

    def _meet(self, tests: dict[int, list[str]]) -> list[int]:
        """Lets each mutant meet its tests, alone; returns which live."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            noticed = [*pool.map(lambda number: self._meet_one(number, tests[number]), tests)]
        return [number for number, test in zip(tests, noticed) if test is None]

    def _meet_one(self, number: int, tests: list[str]) -> str | None:
        if not tests:
            return None
        mutant, clone = self._mutants[number], self._clones.get()
        chosen, log = self._scratch / f"tests{number}", self._scratch / f"log{number}"
        chosen.write_text("\n".join(dict.fromkeys(tests)))
        clone.mutate([mutant])
        for limit in (LONGEST, LONGER):
            status = clone.pytest("-x", "-m", "slow or not slow", f"@{chosen}", log=log, limit=limit)
            if status is not None:
                break
        clone.restore()
        self._clones.put(clone)
        if status in (0, 5):
            return None
        test = (failures(log) or [STOPS if status is None else STARTS_NOT])[0]
        self._record.note(mutant, self._tier, test)
        return test


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the mutants")
    run = commands.add_parser("run", help="let them meet the tests")
    run.add_argument("--tier", choices=["fast", "slow"], default="fast")
    run.add_argument("--left", action="store_true", help="only those that no test noticed so far")
    run.add_argument("--only", default="", help="part of a mutant's name")
    options = parser.parse_args()
    if options.command == "list":
        for mutant in mutants():
            print(f"{mutant.name}  ->  {' '.join(mutant.new.split())[:80]}")
        return
    changed = "git status --porcelain --untracked-files=no -- fsdp_wrap tests".split()
    if subprocess.check_output([*changed, f":!{RECORD.relative_to(ROOT)}"], cwd=ROOT):
        raise SystemExit("a commit is judged, and something is not committed: commit it first")
    with tempfile.TemporaryDirectory() as scratch:
        Run(options.tier, options.left, options.only, Path(scratch)).everything()


if __name__ == "__main__":
    main()
