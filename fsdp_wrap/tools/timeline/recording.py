"""`timeline`: records the steps that run in a context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from fsdp_wrap._comm import accelerator_of, all_gather_object, default_group
from fsdp_wrap._core import everywhere
from fsdp_wrap._core.torch_private import default_store
from fsdp_wrap._runtime import buffers_of
from fsdp_wrap.tools.memory import explain_memory_errors
from fsdp_wrap.tools.models import Models, modules_of, named_units
from fsdp_wrap.tools.timeline import trace
from fsdp_wrap.tools.timeline.assemble import Assembler
from fsdp_wrap.tools.timeline.clocks import ClockOffset, align, this_host
from fsdp_wrap.tools.timeline.picture import draw
from fsdp_wrap.tools.timeline.recorder import TimelineRecorder
from fsdp_wrap.tools.timeline.records import RankRecord
from fsdp_wrap.tools.timeline.report import report_lines

_RECORDINGS = "fsdp_wrap recordings"


class Timeline:
    """The recorded steps of some ranks: computation, transfers and waits of each unit.

    It is empty while the context of `timeline` is open.

    Args:
        ranks: The records, at most one of each rank.

    Attributes:
        ranks: The records, by rank.
    """

    def __init__(self, ranks: Iterable[RankRecord] = ()) -> None:
        self.ranks: Sequence[RankRecord] = ()
        self.fill(ranks)

    def fill(self, ranks: Iterable[RankRecord]) -> None:
        """Replaces the records.

        Args:
            ranks: One record of each rank.

        Raises:
            ValueError: If there are two of one rank.
        """
        ordered = sorted(ranks, key=lambda record: record.rank)
        for record, following in zip(ordered, ordered[1:]):
            if record.rank == following.rank:
                raise ValueError(
                    f"there are two records of rank {record.rank}: merge the files of one recording, each "
                    "rank's once"
                )
        self.ranks = ordered

    def _recorded(self) -> Sequence[RankRecord]:
        if not self.ranks:
            raise RuntimeError(
                "nothing is recorded yet: ask after the context of fsdp_wrap.timeline() has ended"
            )
        return self.ranks

    def report(self) -> str:
        """Returns a table by unit, and a sentence of advice where one is due; see docs/timeline.md.

        Raises:
            RuntimeError: If nothing is recorded yet.
        """
        return "\n".join(report_lines(self._recorded()))

    def plot(self, path: str | Path) -> None:
        """Draws one pass to a file, whose ending tells matplotlib the format.

        Args:
            path: The file.

        Raises:
            ImportError: If matplotlib is missing.
            RuntimeError: If nothing is recorded yet.
        """
        draw(self._recorded(), path)

    def save(self, path: str | Path) -> None:
        """Writes a Chrome trace of all recorded ranks, which Perfetto opens.

        Args:
            path: Path of the file; compressed if it ends in ".gz".

        Raises:
            RuntimeError: If nothing is recorded yet.
        """
        trace.write(self._recorded(), path)


@contextmanager
def timeline(models: Models, path: str | Path | None = None, *, gather: bool = True) -> Iterator[Timeline]:
    """Records the training steps that run in the context.

    Collective over the default process group: all ranks open and close it, since they compare their clocks
    and exchange their records. They exchange nothing if an error leaves the context; an out-of-memory error
    then lists the memory of the units (docs/timeline.md).

    Args:
        models: Wrapped or sharded, or with such modules inside. Names of units begin with the names or
            numbers of several models.
        path: A folder, into which each rank writes its own trace, "rank-00000.json"; `merge` joins them.
            None to write none.
        gather: Whether every rank gets the records of all. With many ranks False is better: each rank then
            has its own record alone, to `save` or in the folder.

    Yields:
        The timeline, which is complete when the context has ended.

    Raises:
        ValueError: If nothing in `models` is wrapped or sharded.
        RuntimeError: If not all ranks open it.
    """
    names = named_units(models, "timeline")
    together = dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    clock = _common_clock(rank) if together else ClockOffset(this_host(), 0, 0)
    device = next((buffers.communicator.device for buffers in buffers_of(names)), torch.device("cpu"))
    params = [param for module in modules_of(models).values() for param in module.parameters()]
    recorder, recorded = TimelineRecorder(names, params, accelerator_of(device)), Timeline()
    begin, failed = perf_counter_ns(), True
    recorder.follow_optimizers()
    try:
        with everywhere.having(recorder), explain_memory_errors(models):
            yield recorded
        failed = False
    finally:
        recorder.stop()
        record = Assembler(recorder, perf_counter_ns()).record(rank, device.type, clock, begin)
        if path is not None:
            trace.write([record], Path(path) / f"rank-{rank:05d}.json")
        shared = together and gather and not failed
        recorded.fill(all_gather_object(record, default_group("timeline()")) if shared else [record])


def _common_clock(rank: int) -> ClockOffset:
    """Returns this clock's offset; collective."""
    store = default_store()
    number = store.add(f"{_RECORDINGS} of {rank}", 1)
    prefixed = PrefixStore(f"{_RECORDINGS} {number}", store)
    return align(prefixed, rank, dist.get_world_size(), this_host())


def load(path: str | Path) -> Timeline:
    """Reads a trace that `Timeline.save`, `timeline` or `merge` has written.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such trace.
    """
    return Timeline(trace.read(path))


def merge(paths: Iterable[str | Path], out: str | Path) -> Timeline:
    """Joins the traces of ranks into one, in the clock of rank 0, and writes it.

    Args:
        paths: Paths of the traces of one recording; a folder stands for the files of ranks in it.
        out: Where to write.

    Returns:
        The whole.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If two are of one rank, or one is no trace of a timeline.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("rank-*.json")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"there is no trace of a rank (rank-*.json) in {', '.join(map(str, paths))}")
    merged = Timeline(record for file in files for record in trace.read(file))
    merged.save(out)
    return merged
