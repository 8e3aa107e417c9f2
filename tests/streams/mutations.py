"""Removes every wait, event and stream switch of the package, one at a time, and shows that it is missed.

    python tests/streams/mutations.py [--only PART_OF_A_PATH]

Each removal runs the programs of `tests/stream_programs.py`, in a process of its own over a copy of the
package, until the simulation objects. What nobody misses is superfluous, or no program needs it: the script
fails.
"""

import argparse
import ast
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CALLS = ("wait", "wait_stream", "wait_event", "synchronize")
_ON_THE_HOST = (
    *("_comm/works.py", "messages.py", "shared_memory/", "checkpoint/", "compat/", "weights/"),
    "_state_over_replicas/stage.py",
    *("replica_groups.py", "tools/machines/", "tools/timeline/clocks.py"),
)
"""What has to do with processes, not with streams."""

_NOT_RECORDED = "none here: programs record nothing, and wait in the other place (`test_on_an_accelerator`)"
_TOLD = "none: `reshard` waits itself; here the wait is told (`test_a_trace_holds_what_events_tell`)"
_TIMES = "none: times are read afterwards, with which nothing is computed (`test_on_an_accelerator`)"
_NO_MUON = "none here: no program has a Muon (`test_numbers_are_torchs_in_float64`)"

_LIKELY = {
    "custom_comms": ("hooked", "users"),
    "StreamLane.issue": ("trains", "offloads", "collective_raises"),
    "_fsdp_module.py": ("looks",),
    "FromHost": ("offloads",),
    "ToHost": ("offloads",),
    "GatherShare": ("together",),
    "optim_offload.py": ("optimizer_state",),
    "lanes.py StreamLane.finish": ("evaluates",),
    "process_group.py": ("summons-first", "group", "states"),
    "summoned.py": ("summons",),
    "full_params.py": ("summons-first",),
    "norms.py": ("clips",),
    "scaler.py": ("scales",),
    "streaming.py": ("states",),
    "step.py": ("by_hand", "evaluates"),
    "NotedReduction": ("compressed", "comm_hook", "users"),
    "_reproducible": ("reproducible",),
    "_activations": ("activations",),
    "Reduction.abandon": ("fails",),
    "Reduction.finish": ("no_shard", "hybrid", "trains"),
    "Buffers.reshard": ("looks", "fails", "prefetches"),
}

_KEPT = {
    (
        "NotedReduction.wait",
        "self._pending.wait()",
    ): "none here: the count follows it on the same lane; on the CPU "
    "they are works of their own (`test_a_sum_is_waited_for_beside_the_count_of_who_took_part`)",
    ("Unit.unshard", "buffers.wait()"): _NOT_RECORDED,
    ("Unit.reshard", "buffers.wait()"): _TOLD,
    ("Recorder.__init__", "event.synchronize()"): _TIMES,
    ("Recorder.stop", "self._accelerator.record_time().synchronize()"): _TIMES,
    ("Recorder.stop", "stream_range.end.synchronize()"): _TIMES,
    ("Team.agreed", "self.communicator.all_gather([full], lambda: part.copy_(mine)).wait()"): _NO_MUON,
    ("_Round.compute", "coming.pending.wait()"): _NO_MUON,
    ("_Return.take", "self.pending.wait()"): _NO_MUON,
}
"""Why a place is needed that no program on the simulation misses, and which test holds that."""

_AT_ONCE = 2

_NET = "_EventPending.__del__"

_SIDE = r"(\S+ on .+?) \(.*\)"
_UNORDERED = rf"rank \d+: {_SIDE} (?:reads|writes) .* that {_SIDE} (read|wrote): no event"


@dataclass(frozen=True)
class Place:
    """One wait or switch: its file below the package, what stands there, and what stands there without it."""

    path: str
    line: int
    text: str
    scope: str
    instead: str

    @property
    def row(self) -> str:
        return f"| `{self.path}` {self.scope} | `{self.text}` |"

    def removed_from(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1]
        lines[self.line - 1] = text[: len(text) - len(text.lstrip())] + self.instead + "\n"
        return "".join(lines)


def places() -> Iterator[Place]:
    package = ROOT / "fsdp_wrap"
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        for place in _places_in(path, file.read_text()):
            if not any(part in f"{path} {place.scope}" for part in _ON_THE_HOST):
                yield place


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


def objections(chosen: Sequence[Place]) -> Iterator[tuple[Place, str]]:
    """Removes places, some at a time, and tells how the simulation objects; "" if it does not."""
    running: deque[_Removal] = deque()
    for place in chosen:
        running.append(_Removal(place))
        if len(running) >= _AT_ONCE:
            yield running.popleft().end()
    while running:
        yield running.popleft().end()


class _Removal:
    """A process that runs programs over a copy of the package without a place."""

    def __init__(self, place: Place) -> None:
        self._place, self._folder = place, Path(tempfile.mkdtemp())
        shutil.copytree(ROOT / "fsdp_wrap", self._folder / "fsdp_wrap")
        # That by which a wait is made up for when nobody has waited would hide all others.
        net = next(other for other in places() if other.scope == _NET)
        for without in {net, place}:
            file = self._folder / "fsdp_wrap" / without.path
            file.write_text(without.removed_from(file.read_text()))
        self._read, write = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._read)
            self._run(write)
        os.close(write)

    def _run(self, write: int) -> None:
        where = f"{self._place.path} {self._place.scope}"
        likely = next((names for part, names in _LIKELY.items() if part in where), ("none",))
        try:
            told = _first_objection(self._folder, self._place.scope == _NET, likely)
        except BaseException:  # a child that must not go on
            told = traceback.format_exc(limit=1)
        os.write(write, told.replace("\n", " ").replace("|", "/").encode()[:2000])
        os._exit(0)

    def end(self) -> tuple[Place, str]:
        with os.fdopen(self._read) as pipe:
            told = pipe.read()
        _, status = os.waitpid(self._child, 0)
        shutil.rmtree(self._folder)
        return self._place, told or ("the process died" if status else "")


def _first_objection(folder: Path, drops: bool, likely: tuple[str, ...]) -> str:
    sys.path[:0] = [str(folder), str(ROOT / "tests"), str(ROOT / "tests" / "streams")]
    from test_stream_programs import test_gathers_and_reductions_run_beside_products

    from bed.accelerator import run_simulated
    from stream_programs import PROGRAMS

    programs = {name: body for name, body in PROGRAMS.items() if (name == "dropped") is drops}
    first = {name: body for name, body in programs.items() if name.startswith(likely)}
    rounds = ((first, False), (programs, False), (first, True), (programs, True))
    for name, (size, program), records in ((*item, how) for some, how in rounds for item in some.items()):
        try:
            run_simulated(size, program, records)
        except AssertionError as error:
            lines = str(error).splitlines()
            told = lines[1] if len(lines) > 1 else lines[0]
            matched = re.match(_UNORDERED, told)  # then without units, phases and sizes
            return f"{name}: {f'{matched[1]} / {matched[2]} {matched[3]}' if matched else told}"
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
    print("| where | what | missed by: program, and what no event orders |\n|---|---|---|", flush=True)
    for place, told in objections([place for place in places() if chosen in place.path]):
        told = told or _KEPT.get((place.scope, place.text), "")
        unmissed += not told
        print(f"{place.row} {told or '**nobody**'} |", flush=True)
    return 1 if unmissed else 0


if __name__ == "__main__":
    sys.exit(main())
