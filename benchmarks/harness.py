"""Parts that benchmarks share: questions, rank processes, competitors in turns, ratios, the machine."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

Table = dict[str, dict[str, float]]
"""Figures by row (an implementation, mostly) and column."""
Figures = dict[str, Table]
"""Tables by title."""
BASELINES = {"ddp": ("ddp",), "fsdp1": ("fsdp1", "fsdp1_flat"), "fsdp2": ("fsdp2",)}
"""The implementations that times are set against; of several, the fastest."""


# --- questions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The wishes of the command line; the question decides about empty fields."""

    impl: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    ranks: int = 2
    rounds: int | None = None

    def implementations(self, known: Sequence[str]) -> list[str]:
        """Returns the known implementations that are asked for."""
        return [name for name in known if name in (self.impl or known)]

    def cases_of(self, known: Sequence[str], usual: Sequence[str] = ()) -> list[str]:
        """Returns the known cases that are asked for; the usual ones by default."""
        return [name for name in known if name in (self.cases or usual or known)]


@dataclass(frozen=True)
class Question:
    """Something to measure, and how its answer is shown.

    Attributes:
        name: Its name on the command line.
        title: Heading.
        about: The meaning of the figures.
        ask: Measures.
        chart: The column that the picture shows.
        cases: Names that `--cases` may have.
        implementations: Names that `--impl` may have.
    """

    name: str
    title: str
    about: str
    ask: Callable[[Settings], Figures]
    chart: str
    cases: Sequence[str] = ()
    implementations: Sequence[str] = ()

    def check(self, settings: Settings) -> None:
        """Refuses names that are none: what is asked for must not be left out without a word.

        Raises:
            ValueError: If there is one.
        """
        for option, given, known in (
            ("--cases", settings.cases, self.cases),
            ("--impl", settings.impl, self.implementations),
        ):
            if unknown := [name for name in given if name not in known]:
                there = f"there are {', '.join(known)}" if known else f"{self.name} has none to choose from"
                raise ValueError(f"{option}: {', '.join(map(repr, unknown))} unknown; {there}")


def ask_alone(question: Question) -> None:
    """Runs a script: asks one question as the command line says, and prints the tables."""
    parser = parser_of(question)
    ask_parsed(question, parser, vars(parser.parse_args()))


def parser_of(question: Question) -> argparse.ArgumentParser:
    """Returns a parser of the options that every script takes."""
    parser = argparse.ArgumentParser(description=f"{question.title}. {question.about}")
    names: Callable[[str], tuple[str, ...]] = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--impl", type=names, default=(), metavar="A,B", help="implementations")
    parser.add_argument("--cases", type=names, default=(), metavar="A,B", help=", ".join(question.cases))
    parser.add_argument("--ranks", type=partial(_at_least, 1), default=2, metavar="N")
    parser.add_argument("--rounds", type=partial(_at_least, 1), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def ask_parsed(
    question: Question, parser: argparse.ArgumentParser, options: dict[str, Any]
) -> dict[str, Any]:
    """Asks one question with parsed options, and prints the tables; returns what `answer` does."""
    path, settings = options.pop("json"), Settings(**options)
    try:
        question.check(settings)
    except ValueError as error:
        parser.error(str(error))
    preload()
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    answered = answer(question, settings)
    if path:
        path.write_text(json.dumps(answered, indent=1) + "\n")
    return answered


def answer(question: Question, settings: Settings) -> dict[str, Any]:
    """Asks one question and prints its tables; returns them with when, where and in how many seconds."""
    there, date, started = machine(), datetime.now(timezone.utc), time.monotonic()
    figures = question.ask(settings)
    seconds = round(time.monotonic() - started, 1)
    print(*(f"\n{title}\n\n{as_markdown(table)}" for title, table in figures.items()), sep="\n")
    print(f"\n{question.name} took {seconds:.0f} s", flush=True)
    return {"date": f"{date:%Y-%m-%d %H:%M} UTC", "machine": there, "seconds": seconds, "figures": figures}


def as_markdown(table: Table) -> str:
    """Returns a table with aligned columns; cells without a measurement stay empty."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [
        ["", *columns],
        *([name, *(_figure(row.get(c)) for c in columns)] for name, row in table.items()),
    ]
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    rows = (
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        for line in lines
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{4 if 0 < abs(value) < 0.05 else digits}f}"


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
    return number


# --- rank processes -----------------------------------------------------------------------------------


def preload() -> None:
    """Lets rank processes start fast: they fork from one that has imported everything."""
    multiprocessing.set_forkserver_preload(["benchmarks.implementations"])


def run_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Calls `work(*arguments)` in `ranks` new processes over gloo, one thread each; returns rank 0's result.

    The result must be JSON. An error in one rank ends the others and is raised here.
    """
    return run_group(work, ranks, "gloo", ranks, arguments)


def run_fake(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Calls `work(*arguments)` in one new process, on a group of `ranks` that sends nothing."""
    return run_group(work, 1, "fake", ranks, arguments)


def run_group(
    work: Callable[..., Any], processes: int, backend: str, ranks: int, arguments: tuple[Any, ...]
) -> Any:
    """Calls `work(*arguments)` in new processes, the first ranks of a group; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        torch_multiprocessing.start_processes(
            _rank, (work, backend, ranks, folder, arguments), processes, start_method="forkserver"
        )
        return json.loads(Path(folder, "result").read_text())


def _rank(
    rank: int, work: Callable[..., Any], backend: str, ranks: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    warnings.filterwarnings("ignore", module=r"torch\.")  # of what its own functions will no longer do
    torch.set_num_threads(1)
    if "nccl" in backend:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are here
        torch.cuda.set_device(rank)
    store = FakeStore() if backend == "fake" else dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    gc.freeze()  # what is imported need not be looked at by every collection
    result = work(*arguments)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    gc.collect()  # models are cycles and hold the group, whose threads must end before the interpreter
    dist.destroy_process_group()


# --- time ---------------------------------------------------------------------------------------------


def interleave(
    competitors: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Called on every rank: lets competitors take one turn each per round.

    Each round starts with another competitor, so that none always follows the same one's use of the caches.

    Returns:
        Their seconds per round by the clock, of the slowest rank.
    """
    names = list(competitors)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds = _timed(competitors[name], clock)
            if turn >= warmup:
                times[name].append(seconds)
    return times if dist.get_backend() == "fake" else slowest(times)


def compare(
    times: Mapping[str, Sequence[float]],
    baselines: Mapping[str, Sequence[str]] = BASELINES,
    unit: tuple[str, float] = ("ms", 1e3),
) -> Table:
    """Medians and ranges in a unit, and ratios to baselines.

    `/ base` is the median of the ratios within a round, which bears a machine whose load changes while it
    measures; `medians / base` the ratio of the medians.
    """
    name, scale = unit
    table = {
        impl: {name: scale * statistics.median(mine), "min": scale * min(mine), "max": scale * max(mine)}
        for impl, mine in times.items()
    }
    for base, members in baselines.items():
        if there := [member for member in members if member in times]:
            fastest = times[min(there, key=lambda member: statistics.median(times[member]))]
            for impl, mine in times.items():
                paired = statistics.median(own / other for own, other in zip(mine, fastest))
                table[impl][f"/ {base}"] = paired
                table[impl][f"medians / {base}"] = statistics.median(mine) / statistics.median(fastest)
    return table


def _timed(turn: Callable[[], object], clock: Callable[[], float]) -> float:
    dist.barrier()
    started = clock()
    turn()
    return clock() - started


def slowest(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Returns the slowest rank's seconds in each turn; called on every rank."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, times)
    return {name: [max(turn) for turn in zip(*(of_rank[name] for of_rank in by_rank))] for name in times}


# --- the machine --------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describes the machine and the versions, on which the figures depend besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.exists():
        for line in described.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
