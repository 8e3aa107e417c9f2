"""`record_values`: writes statistics of a step's values, each so many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._runtime import Step, units_in
from fsdp_wrap._values import files
from fsdp_wrap._values.files import Key, RecordedStep
from fsdp_wrap._values.pieces import Piece, first_names
from fsdp_wrap._values.plain import PlainRecorder
from fsdp_wrap._values.recorder import Reader, Recorder, UnitRecorder
from fsdp_wrap._values.statistics import Statistics


def check_every(every: object) -> None:
    """Raises a ValueError unless a value is a number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be a positive number of steps")


class Rows(Reader):
    """Statistics of the running step; writes them when it has ended.

    Args:
        model: Wrapped or sharded, or a plain module.
        units: Names of the modules of a plain module that count as units.
        write: Takes a step that has ended.
        every: How many steps lie between recorded ones.

    Attributes:
        reads: Whether the running forward is recorded.
        stepped_since: Whether an optimizer has stepped since the last forward began.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        write: Callable[[RecordedStep], object],
        every: int,
    ) -> None:
        self._write, self._every = write, every
        self._number = self._passes = 0
        self._rows: dict[Key, Statistics] = {}
        self.reads = self.stepped_since = False
        self.recorder = _recorder_of(model, units, self)

    def at(self, seam: str, unit: str) -> Statistics:
        """Returns the statistics of a seam of a unit."""
        return self._rows.setdefault((seam, unit), Statistics())

    def has(self, seam: str, unit: str) -> bool:
        """Whether a seam of a unit has statistics."""
        return (seam, unit) in self._rows

    def begin(self, step: Step | None) -> None:
        if self.stepped_since:
            self.end_step()
        self.reads = torch.is_grad_enabled() and self._number % self._every == 0
        self._passes += self.reads

    def see(self, seam: str, unit: str, pieces: Iterable[Piece]) -> None:
        if not self.reads or (seam in (files.PARAMETER, files.AGAIN) and self.has(seam, unit)):
            return
        if seam == files.PARAMETER:
            self.add(files.SHARD, unit, self.recorder.shards(unit))
        self.add(seam, unit, pieces)

    def add(self, seam: str, unit: str, pieces: Iterable[Piece]) -> None:
        """Adds pieces to the statistics of a seam of a unit."""
        row = self.at(seam, unit)
        for piece in pieces:
            row.add(piece.data, piece.fqn, piece.start)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped_since = self.stepped_since or self.recorder.holds(optimizer)

    def end_step(self) -> None:
        """Ends a step, and writes it if it was recorded."""
        self.reads = False
        if self._rows:
            for unit in () if self.recorder.is_reduced else self.recorder.units:
                if self.has(files.GRADIENT, unit):
                    self.at(files.REDUCED, unit).merge(self.at(files.GRADIENT, unit))
            for unit in self.recorder.units:
                self.add(files.UPDATE, unit, self.recorder.shards(unit))
            self._write(RecordedStep(self._number, self._passes, self._rows))
        self._number += self.stepped_since
        self._rows, self._passes, self.stepped_since = {}, 0, False


class ValueRecord:
    """A record that is being written; a context that ends it.

    Args:
        rows: The statistics of the running step.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        rows.recorder.follow()
        rows.recorder.open()

    def end_step(self) -> None:
        """Ends a step by hand: for optimizers that are not torch's."""
        self._rows.stepped_since = True

    def close(self) -> None:
        """Ends the record."""
        self._rows.recorder.leave()
        self._rows.end_step()

    def __enter__(self) -> ValueRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def record_values(
    model: nn.Module, path: str | Path, every: int = 100, *, units: Sequence[str] = ()
) -> ValueRecord:
    """Records values of training steps: checksum, norm, largest value, sum and counts at each seam.

    Seams are the shards, the gathered parameters, the inputs and outputs of units, their gradients, the
    parameters' gradients, the reduced gradients and the updated shards. `fsdp-wrap values diff` compares two
    records, also of other numbers of ranks, strategies, front-ends and precisions, or of the plain module.

    A step ends when an optimizer of `torch.optim` that has parameters of the model has stepped, and the next
    forward begins. Nothing is communicated: each rank writes a file of its own.

    Args:
        model: Wrapped or sharded, or a plain module.
        path: A folder that has no record yet, the same on all ranks.
        every: How many steps lie between recorded ones; the first is recorded.
        units: Names of the modules of a plain module that are units in the other record, without the
            root.

    Returns:
        The record, as a context or to `close`.

    Raises:
        ValueError: If the folder has a record already, `every` is no positive number, a name is unknown, or
            `units` are given for a model that has units.
    """
    check_every(every)
    if units_in(model) and units:
        raise ValueError(f"units={[*units]} are for a plain module, and {type(model).__name__} has units")
    return ValueRecord(Rows(model, units, files.Writer(path, header_of(model, units)).write, every))


def _recorder_of(model: nn.Module, units: Sequence[str], reader: Reader) -> Recorder:
    if names := first_names(model):
        return UnitRecorder(names, reader)
    return PlainRecorder(model, units, header_of(model, units).ranks == 1, reader)


def header_of(model: nn.Module, units: Sequence[str]) -> files.Header:
    """Returns the facts about this rank; `units` are those of a plain module."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    contributors, copies = float(ranks), dict.fromkeys(("", *units), rank)
    if sharded := units_in(model):
        all_buffers = {name: unit.buffers for name, unit in sharded.items() if unit.params}
        copies = {name: buffers.replicas.rank for name, buffers in all_buffers.items()}
        contributors = max([buffers.gradients.contributors for buffers in all_buffers.values()], default=1.0)
    return files.Header(rank, ranks, contributors, copies, torch.__version__)
