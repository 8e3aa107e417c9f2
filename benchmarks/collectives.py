"""Latency and throughput of gathers and reductions over gloo, by size and way; the ways take turns.

    python -m benchmarks.collectives --ranks 2 --megabytes 0.06,0.25,1,4,16,64

`plain` are gloo's own collectives, `exchange` messages between every two ranks. Sizes are those of the
full tensor; GB/s count the bytes that a rank needs from others. `issue` is the part of the time in which the
caller was held up, `sleep` the time, relative, of a collective beside which the caller slept as long as it
takes alone: 1 if all of it runs beside the caller, 2 if nothing does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import interleave, machine, run_ranks
from fsdp_wrap._exchange import exchange_gather, exchange_reduce

Start = Callable[[], Any]


def ways(numel: int) -> dict[str, Start]:
    """What starts each operation in each way, on a full tensor of so many elements; returns works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    full = torch.rand(numel // size * size)
    parts = full.chunk(size)
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


def report(ranks: int, megabytes: float, rounds: int | None) -> str:
    numel = max(ranks, int(megabytes * 1e6 / 4))
    found = run_ranks(measure, ranks, numel, rounds or max(5, min(100, int(150 / (megabytes * ranks)))))
    needed = 4 * numel * (ranks - 1) / ranks
    lines = [f"{megabytes:g} MB, {ranks} ranks        ms    GB/s   issue   sleep"]
    for name, (alone, issue, beside) in found.items():
        cells = f"{1e3 * alone:8.2f} {needed / alone / 1e9:7.2f} {issue / alone:7.0%} {beside / alone:7.2f}"
        lines.append(f"  {name:16} {cells}")
    return "\n".join(lines)


def main() -> None:
    options = _parse()
    print(", ".join(f"{name} {value}" for name, value in machine().items()) + "\n", flush=True)
    for ranks in options.ranks:
        for megabytes in options.megabytes:
            print(report(ranks, megabytes, options.rounds) + "\n", flush=True)


def _numbers(kind: Callable[[str], Any], text: str) -> list[Any]:
    return [kind(each) for each in text.split(",")]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gathers and reductions over gloo, by size and way.")
    parser.add_argument("--ranks", type=partial(_numbers, int), default="2,4,8", metavar="N,M")
    parser.add_argument("--megabytes", type=partial(_numbers, float), default="0.06,0.25,1,4,16,64")
    parser.add_argument("--rounds", type=int, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
