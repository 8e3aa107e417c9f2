"""Latency of small collectives at 2, 4 and 8 ranks, and the processor's time they take; the ways take turns.

python -m benchmarks.latency --cases "4 KB,4 KB on 8 ranks"
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from benchmarks.collectives import BARRIER, MESSAGES, SIZES, Start, starts
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_ranks

SMALL = ["tiny", "4 KB", "64 KB", "1 MB"]
ROUNDS = {2: 30, 4: 10, 8: 5}  # by ranks: on few cores a collective of gloo's takes tens of milliseconds at 8
ON_MORE = {f"{size} on {ranks} ranks": (size, ranks) for ranks in (4, 8) for size in SMALL}
CASES = [*SMALL, *ON_MORE]
ONE_AFTER_THE_OTHER = 10
"""Collectives of a turn, as those of a model's small units follow each other."""
WALL, CPU = "us", "CPU us"


def measure(size: int, rounds: int) -> dict[str, Table]:
    """Returns the figures of each way by operation; called on every rank."""
    by_operation = starts(size)
    by_operation[BARRIER] = starts(4 * dist.get_world_size())["all-reduce"]
    by_operation[BARRIER]["gloo"] = lambda: dist.barrier(async_op=True)
    return {what: _figures(ways, rounds) for what, ways in by_operation.items()}


def _figures(ways: Mapping[str, Start], rounds: int) -> Table:
    names = [name for name in ways if name not in (MESSAGES, "memory copy")]
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(2 + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = _turn(ways[name])
            if turn >= 2:  # by then all have met
                wall[name].append(1e6 * seconds[0])
                cpu[name].append(1e6 * seconds[1])
    return {name: {WALL: statistics.median(wall[name]), CPU: statistics.median(cpu[name])} for name in names}


def _turn(start: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of one collective, and those of the processor: of all ranks, their mean."""
    dist.barrier()
    begin, spent = time.perf_counter(), time.process_time()
    for _ in range(ONE_AFTER_THE_OTHER):
        work = start()
        if hasattr(work, "wait"):
            work.wait()
    took = torch.tensor([time.perf_counter() - begin, time.process_time() - spent], dtype=torch.float64)
    dist.all_reduce(took)
    wall, cpu = (took / dist.get_world_size() / ONE_AFTER_THE_OTHER).tolist()
    return wall, cpu


def ask(settings: Settings) -> Figures:
    """Returns a table by way and size for each operation and number of ranks."""
    figures: Figures = {}
    for case in settings.cases_of(CASES, usual=[case for case in CASES if "tiny" not in case]):
        size, ranks = ON_MORE.get(case, (case, settings.ranks))
        rounds = settings.rounds or ROUNDS.get(ranks, min(ROUNDS.values()))
        for what, table in run_ranks(measure, ranks, SIZES[size], rounds).items():
            title = f"{what}, {ranks} ranks"
            if what == BARRIER and title in figures:  # of one size
                continue
            for way, row in table.items():
                for figure, value in row.items():
                    column = figure if what == BARRIER else f"{size}, {figure}"
                    figures.setdefault(title, {}).setdefault(way, {})[column] = value
    return figures


QUESTION = Question(
    "latency",
    "Latency of small collectives",
    f"""\
Ranks of one host, {ONE_AFTER_THE_OTHER} collectives one after the other, each waited for at once; medians of
{", ".join(f"{rounds} turns at {ranks} ranks" for ranks, rounds in ROUNDS.items())}. `gloo` are
its own as torch.distributed calls them, `fsdp_wrap` the library over gloo, `fsdp_wrap_shared` through memory.
`{CPU}` is the processor's time of a rank with all of its threads, waiting included. A barrier is the
reduction of one number for the library, which has none of its own.""",
    ask,
    chart=WALL,
    cases=CASES,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
