"""Throughput of gathers and reductions over gloo, by size and way; the ways take turns.

python -m benchmarks.collectives --ranks 2 --cases "1 MB,64 MB"
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, ask_alone, interleave, run_ranks
from fsdp_wrap._exchange import exchange_gather, exchange_reduce

MEGABYTES = {"tiny": 0.001} | {f"{size} MB": float(size) for size in ("0.06", "0.25", "1", "4", "16", "64")}
Start = Callable[[], Any]


def ways(numel: int) -> dict[str, Start]:
    """What starts each operation in each way, on a full tensor of so many elements; returns works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    full = torch.rand(numel // size * size)
    parts = dict(enumerate(full.chunk(size)))
    shard = torch.empty_like(parts[0])
    return {
        "gather plain": lambda: dist.all_gather_into_tensor(full, parts[rank], async_op=True),
        "gather exchange": lambda: exchange_gather(group, rank, parts),
        "reduce plain": lambda: dist.reduce_scatter_tensor(shard, full, async_op=True),
        "reduce exchange": lambda: exchange_reduce(group, rank, shard, parts),
    }


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
        time.sleep(self.pause)
        work.wait()


def measure(numel: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Called on every rank: seconds of each way, thereof of issuing, and beside a sleep."""
    timed = {name: Timed(start) for name, start in ways(numel).items()}
    alone = interleave(timed, rounds, warmup=2)
    issue = {name: statistics.median(each.issue[2:]) for name, each in timed.items()}
    for name, each in timed.items():
        each.pause = statistics.median(alone[name])
    beside = interleave(timed, rounds, warmup=0)
    median = statistics.median
    return {name: (median(alone[name]), issue[name], median(beside[name])) for name in timed}


def ask(settings: Settings) -> Figures:
    """A table for each size."""
    figures = {}
    for case in settings.cases_of([*MEGABYTES], usual=[*MEGABYTES][1:]):
        megabytes = MEGABYTES[case]
        numel = int(megabytes * 1e6 / 4)
        rounds = settings.rounds or max(5, min(60, int(100 / megabytes)))
        found = run_ranks(measure, settings.ranks, numel, rounds)
        needed = 4 * numel * (settings.ranks - 1) / settings.ranks
        figures[f"{case}, {settings.ranks} ranks"] = {
            name: {
                "ms": 1e3 * alone,
                "GB/s": needed / alone / 1e9,
                "issue": issue / alone,
                "sleep": beside / alone,
            }
            for name, (alone, issue, beside) in found.items()
        }
    return figures


QUESTION = Question(
    "collectives",
    "Gathers and reductions over gloo",
    """\
`plain` are gloo's own collectives, `exchange` messages between every two ranks (`fsdp_wrap/_exchange.py`).
Sizes are those of the full tensor; GB/s count the bytes that a rank needs from others. `issue` is the part of
the time in which the caller was held up; `sleep` the time, relative, of a collective beside which the caller
slept as long as it takes alone: 1 if all of it runs beside the caller, 2 if nothing does.""",
    ask,
    chart="GB/s",
)


def main() -> None:
    ask_alone(QUESTION)


if __name__ == "__main__":
    main()
