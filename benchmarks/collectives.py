"""Time and speed of collectives by operation, way and size; the ways take turns.

python -m benchmarks.collectives --ranks 2 --cases "1 MB,64 MB"
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, interleave, run_ranks
from fsdp_wrap._comm.groups import ranks_in
from fsdp_wrap._comm.select import make_communicator
from fsdp_wrap._comm.shared_memory.memory import SharedBuffer

KB, MB = 1 << 10, 1 << 20
SIZES = {"tiny": KB} | {f"{n} KB": n * KB for n in (4, 64)} | {f"{n} MB": n * MB for n in (1, 16, 64, 256)}
GLOO = {"FSDP_WRAP_SHARED_MEMORY": "0"}
# How a communicator is told; messages are what it takes by itself where tensors are large.
MESSAGES = "fsdp_wrap, messages"
WAYS: dict[str, dict[str, str]] = {
    "fsdp_wrap": GLOO,
    MESSAGES: {**GLOO, "FSDP_WRAP_GLOO": "exchange"},
    "fsdp_wrap_shared": {"FSDP_WRAP_SHARED_MEMORY": "1"},
}
MEMORY_COPY, MOST = "memory copy", "most"
BARRIER = "barrier"
OVERLAP = ("all-gather", "reduce-scatter")  # what training runs beside its computing
MOST_OVERLAPPED = 16 * MB
Start = Callable[[], Any]


def _gloo(full: torch.Tensor, part: torch.Tensor) -> dict[str, Start]:
    """Returns by operation a function that starts gloo's own on a tensor and this rank's part of another."""
    return {
        "all-gather": lambda: dist.all_gather_into_tensor(full, part, async_op=True),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, full, async_op=True),
        "all-reduce": lambda: dist.all_reduce(full, async_op=True),
        "broadcast": lambda: dist.broadcast(full, 0, async_op=True),
    }


def _ours(way: str, full: torch.Tensor, part: torch.Tensor) -> dict[str, Start]:
    """Returns the same for a communicator, whose broadcast blocks, on a buffer that it has allocated."""
    by = _communicator(way)
    gathered, buffer = (by.buffer(full.numel(), full.dtype) for _ in range(2))
    own = by.own_part(gathered.data)
    gathered.free()
    buffer.free()
    buffer.allocate()  # from the memory that training has its buffers from
    full = buffer.data.zero_()

    def gather() -> Any:
        if isinstance(gathered, SharedBuffer):  # resharded before it is gathered anew, which takes no time
            gathered.free()
        return by.gather_into([gathered], lambda: own.copy_(part))

    return {
        "all-gather": gather,
        "reduce-scatter": lambda: by.reduce_scatter([part], [full]),
        "all-reduce": lambda: by.all_reduce([full]),
        "broadcast": lambda: by.broadcast(full),
    }


def _communicator(way: str) -> Any:
    with patch.dict(os.environ, WAYS[way]):
        return make_communicator(ranks_in(dist.group.WORLD), torch.device("cpu"))


def starts(size: int) -> dict[str, dict[str, Start]]:
    """Returns by operation and way a function that starts it on full tensors of so many bytes."""
    ranks = dist.get_world_size()
    full = torch.empty(size // 4 // ranks * ranks).zero_()  # of zeros, so that sums stay finite
    part, copy = torch.empty(full.numel() // ranks).zero_(), torch.empty_like(full)
    by_way = {"gloo": _gloo(full, part), **{way: _ours(way, full, part) for way in WAYS}}
    by_operation = {what: {way: of[what] for way, of in by_way.items()} for what in by_way["gloo"]}
    for what, ways in by_operation.items():
        ways[MEMORY_COPY] = partial(copy.copy_, full)
        if what not in OVERLAP:  # which alone may be made of messages
            del ways[MESSAGES]
    return by_operation


class Timed:
    """One way of one operation, which notes how long issuing it took."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.issue: list[float] = []
        self.pause = 0.0

    def __call__(self) -> None:
        begin = time.perf_counter()
        work = self._start()
        self.issue.append(time.perf_counter() - begin)
        if self.pause:  # to sleep for no time takes some
            time.sleep(self.pause)
        if hasattr(work, "wait"):  # what blocks returns none, and a copy its tensor
            work.wait()


def measure(size: int, rounds: int) -> dict[str, Table]:
    """Returns the figures of each way by operation; called on every rank."""
    return {what: _figures(what, size, rounds, ways) for what, ways in starts(size).items()}


def _figures(what: str, size: int, rounds: int, ways: Mapping[str, Start]) -> Table:
    timed = {way: Timed(start) for way, start in ways.items()}
    alone = _medians(interleave(timed, rounds))
    table = {way: {"us": 1e6 * seconds, "GB/s": size / seconds / 1e9} for way, seconds in alone.items()}
    if what in OVERLAP and size <= MOST_OVERLAPPED:
        del timed[MEMORY_COPY], alone[MEMORY_COPY]  # which holds its caller up
        for way, timing in timed.items():
            table[way]["issue"], timing.pause = statistics.median(timing.issue[2:]) / alone[way], alone[way]
        for way, seconds in _medians(interleave(timed, rounds, warmup=0)).items():
            table[way]["sleep"] = seconds / alone[way]
    return table


def measure_barrier(rounds: int) -> Table:
    """Measures gloo's barrier, and reductions of one number; called on every rank."""
    number = torch.zeros(1)
    ways: dict[str, Start] = {"gloo": lambda: dist.barrier(async_op=True)}
    ways |= {way: partial(_communicator(way).all_reduce, [number]) for way in WAYS if way != MESSAGES}
    times = _medians(interleave({way: Timed(start) for way, start in ways.items()}, rounds))
    return {way: {"us": 1e6 * seconds} for way, seconds in times.items()}


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def ask(settings: Settings) -> Figures:
    """Returns a table by way and size for each operation and figure."""
    by_operation: dict[str, dict[str, Table]] = {}
    for case in settings.cases_of([*SIZES], usual=[*SIZES][1:]):
        rounds = settings.rounds or max(5, min(60, 100 * MB // SIZES[case]))
        for what, table in run_ranks(measure, settings.ranks, SIZES[case], rounds).items():
            by_operation.setdefault(what, {})[case] = table
    figures: Figures = {}
    for what, tables in by_operation.items():
        for figure in ("us", "GB/s", *(("issue", "sleep") if what in OVERLAP else ())):
            figures[f"{what}, {figure}"] = _by_size(tables, figure)
        for row in figures[f"{what}, GB/s"].values():
            row[MOST] = max(row.values())
    if settings.cases_of([*SIZES, BARRIER])[-1:] == [BARRIER]:
        figures[BARRIER] = run_ranks(measure_barrier, settings.ranks, settings.rounds or 200)
    return figures


def _by_size(tables: Mapping[str, Table], figure: str) -> Table:
    """Returns one figure of one operation, from its tables by size."""
    ways = next(iter(tables.values()))
    return {
        way: {size: table[way][figure] for size, table in tables.items() if figure in table[way]}
        for way in ways
        if any(figure in table[way] for table in tables.values())
    }


QUESTION = Question(
    "collectives",
    "Collectives",
    f"""\
2 ranks of one host. `gloo` are its own collectives as torch.distributed calls them, `fsdp_wrap` what the
library makes of them over gloo, and `messages` that by messages between every two ranks whatever the size,
which it does by itself for large gathers and reductions; `memory copy` copies as many bytes, on every rank.
A gather of the library's fills a buffer as in training, through shared memory one for all ranks.
Sizes are those of the full tensor, and GB/s are its bytes by the time; `{MOST}`: at any size. `issue` is the
part of the time in which the caller was held up; `sleep` the time, relative, of a collective beside which the
caller slept as long as it takes alone: 1 if all of it runs beside the caller, 2 if nothing does, and more
where a sleep of so short a time takes longer than that. A barrier is
the reduction of one number for the library, which has none of its own.""",
    ask,
    chart=MOST,
    cases=[*SIZES, BARRIER],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
