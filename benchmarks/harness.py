"""What benchmarks share: rank processes, competitors that take turns, summaries, the machine."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@dataclass(frozen=True)
class Summary:
    """Times of one competitor, in milliseconds, against the baseline's.

    `ratio` is that of the medians; `paired` is the median of the ratios within a round, which bears a machine
    whose load changes while it measures.
    """

    median_ms: float
    ratio: float
    paired: float
    min_ms: float
    max_ms: float


def run_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Call `work(*arguments)` in `ranks` new processes over gloo, one thread each; returns rank 0's result.

    The result must be JSON. An error in one rank ends the others and is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, ranks, folder, arguments), nprocs=ranks)
        return json.loads(Path(folder, "result").read_text())


def interleave(
    competitors: Mapping[str, Callable[[], object]], rounds: int, warmup: int, alone: bool = False
) -> dict[str, list[float]]:
    """Let competitors take one step each per round; returns their seconds per round, of the slowest rank.

    Or of this process, if it is `alone` (as on a process group that sends nothing).

    Each round starts with another competitor, so that none always follows the same one's use of the caches.
    """
    names = list(competitors)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = _timed(competitors[name])
            if turn >= warmup:
                times[name].append(seconds)
    return times if alone else _slowest(times)


def summarize(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Summary]:
    """Medians, ratios and range for each competitor."""
    reference = statistics.median(times[baseline])
    return {
        name: Summary(
            median_ms=1e3 * statistics.median(of_name),
            ratio=statistics.median(of_name) / reference,
            paired=statistics.median(mine / base for mine, base in zip(of_name, times[baseline])),
            min_ms=1e3 * min(of_name),
            max_ms=1e3 * max(of_name),
        )
        for name, of_name in times.items()
    }


def table(title: str, summaries: Mapping[str, Summary], baseline: str) -> str:
    """The summaries as text, one competitor a line."""
    width = max(map(len, summaries))
    lines = [title, f"  {'':{width}}  median ms  / {baseline:6}  paired  min - max ms"]
    for name, row in summaries.items():
        spread = f"{row.min_ms:.1f} - {row.max_ms:.1f}"
        lines.append(f"  {name:{width}}  {row.median_ms:9.1f}  {row.ratio:8.2f}  {row.paired:6.2f}  {spread}")
    return "\n".join(lines)


def peak_bytes(action: Callable[[], object]) -> int:
    """Most host memory that tensors of this thread took during an action, beyond that before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = action()  # kept until the end of the measurement
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns())
    del result
    return max(accumulate((event.nbytes() for event in memory), initial=0))


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write_json(path: Path, settings: Mapping[str, Any], results: Mapping[str, Mapping[str, Summary]]) -> None:
    """Keep a run: the machine, how it was asked to measure, and the summaries by case."""
    cases = {case: {name: asdict(row) for name, row in rows.items()} for case, rows in results.items()}
    content = {"machine": machine(), "settings": dict(settings), "cases": cases}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _rank(rank: int, work: Callable[..., Any], ranks: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = work(*arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    gc.collect()  # models are cycles and hold the group, whose threads must end before the interpreter
    dist.destroy_process_group()


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _slowest(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, times)
    return {name: [max(turn) for turn in zip(*(of_rank[name] for of_rank in by_rank))] for name in times}


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
