"""Removes every wait, event and stream switch of the package, one at a time, and shows that it is missed.

    python tests/streams/mutations.py [--only PART_OF_A_PATH]

Each removal runs the programs of `tests/stream_programs.py`, in a process of its own over a copy of the
package, until the simulation objects. What nobody misses is superfluous, or no program needs it: the script
fails.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CALLS = ("wait", "wait_stream", "wait_event", "synchronize")
_ON_THE_HOST = ("watch.py", "messages.py", "shared_memory/", "checkpoint/", "compat/")
"""What has to do with processes, not with streams."""

_LIKELY = {
    "custom_comms": ("hooked", "users"),
    "lanes.py StreamLane.finish": ("evaluates",),
    "process_group.py": ("summons-first", "group", "states"),
    "summoned.py": ("summons",),
    "full_params.py": ("summons-first",),
    "norms.py": ("clips",),
    "scaler.py": ("scales",),
    "streaming.py": ("states",),
    "schedule.py": ("by_hand", "evaluates"),
    "NotedReduction": ("compressed", "comm_hook", "users"),
    "Reduction.abandon": ("fails",),
    "Reduction.finish": ("no_shard", "hybrid", "trains"),
    "ParamHandle.reshard": ("fails", "dropped", "prefetches"),
}

_NET = "_EventPending.__del__"


@dataclass(frozen=True)
class Place:
    """One wait or switch.

    Attributes:
        path: The file, below the package.
        line: Of the statement, from 1.
        text: It.
        scope: The class and the function around it.
        instead: What stands there without it.
    """

    path: str
    line: int
    text: str
    scope: str
    instead: str

    def removed_from(self, source: str) -> str:
        """Returns the source without it."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: len(text) - len(text.lstrip())] + self.instead + "\n"
        return "".join(lines)


def places() -> Iterator[Place]:
    """Finds all of them."""
    package = ROOT / "fsdp_wrap"
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if not any(part in path for part in _ON_THE_HOST):
            yield from _places_in(path, file.read_text())


def _places_in(path: str, source: str) -> Iterator[Place]:
    lines = source.splitlines()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Place]:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            scope = (*scope, node.name)
        instead = _without(node)
        if instead:
            assert isinstance(node, ast.stmt)
            text = lines[node.lineno - 1].strip().split("  #")[0]
            yield Place(path, node.lineno, text, ".".join(scope), instead)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    yield from visit(ast.parse(source), ())


def _without(node: ast.AST) -> str:
    """What stands in the place of a statement without its wait, event or switch; "" if it has none."""
    if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).endswith("stream"):
        return "if True:"
    if isinstance(node, ast.Assign) and ast.unparse(node).endswith(".record_event()"):
        return f"{ast.unparse(node.targets[0])} = current.record_event()"  # of another stream
    call = node.value if isinstance(node, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CALLS):
        return ""
    waited = call.func.value
    # What is waited for at once must be done nevertheless.
    return ast.unparse(waited) if isinstance(waited, ast.Call) and call.func.attr == "wait" else "pass"


def objection(place: Place) -> str:
    """Returns by which program, and how, the simulation objects when a place is removed; "" if none does."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(ROOT / "fsdp_wrap", folder / "fsdp_wrap")
    # That by which a wait is made up for when nobody has waited would hide all others.
    net = next(each for each in places() if each.scope == _NET)
    for each in (net, place):
        file = folder / "fsdp_wrap" / each.path
        file.write_text(each.removed_from(file.read_text()))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            told = _first_objection(folder, place.scope == _NET, _likely(place))
        except BaseException:  # a child that must not go on
            told = traceback.format_exc(limit=1)
        os.write(write, told.replace("\n", " ").replace("|", "/").encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    shutil.rmtree(folder)
    return told or ("the process died" if status else "")


def _likely(place: Place) -> tuple[str, ...]:
    """The programs that are tried first, by how their names begin."""
    return next(
        (names for part, names in _LIKELY.items() if part in f"{place.path} {place.scope}"), ("none",)
    )


def _first_objection(folder: Path, drops: bool, likely: tuple[str, ...]) -> str:
    sys.path[:0] = [str(folder), str(ROOT / "tests"), str(ROOT / "tests" / "streams")]
    from test_stream_programs import test_gathers_and_reductions_run_beside_products

    from bed.accelerator import run_simulated
    from stream_programs import PROGRAMS

    for records in (False, True):
        for name, (size, program) in sorted(
            PROGRAMS.items(), key=lambda each: not each[0].startswith(likely)
        ):
            if (name == "dropped") is not drops:
                continue
            try:
                run_simulated(size, program, records)
            except AssertionError as error:
                lines = str(error).splitlines()
                return f"{name}: {lines[1] if len(lines) > 1 else lines[0]}"
    try:
        test_gathers_and_reductions_run_beside_products("orig")
    except AssertionError as error:
        return f"nothing runs beside products: {error}"
    return ""


def main() -> int:
    import torch  # before all forks, once

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="part of the path of the file")
    chosen = parser.parse_args().only
    unmissed = 0
    print("| where | what | missed by |\n|---|---|---|", flush=True)
    for place in places():
        if chosen in place.path:
            told = objection(place)
            unmissed += not told
            print(f"| `{place.path}` {place.scope} | `{place.text}` | {told or '**nobody**'} |", flush=True)
    return 1 if unmissed else 0


if __name__ == "__main__":
    sys.exit(main())
