"""`record_values`: writes statistics of a step's values, each so many steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, everywhere
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._params import Layout, held_params
from fsdp_wrap._runtime import Unit, schedule_of, units_in
from fsdp_wrap._values import files
from fsdp_wrap._values.pieces import first_names, full_params, gradient_pieces, own_gradients, shard_pieces
from fsdp_wrap._values.plain import PlainSeams
from fsdp_wrap._values.rows import Rows, check_every


class ValueRecord:
    """A record that is being written; a context that ends it.

    Args:
        seams: The seams that are looked at.
        rows: The rows of the running step.
    """

    def __init__(self, seams: ShardedSeams | PlainSeams, rows: Rows) -> None:
        self._seams, self._rows = seams, rows
        self._hook = register_optimizer_step_post_hook(self._on_step)
        seams.open()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = {*map(id, held_params(optimizer))}
        if any(id(param) in held for param in self._seams.params()):
            self._rows.stepped = True

    def end_step(self) -> None:
        """Ends a step by hand: for optimizers that are not torch's."""
        self._rows.stepped = True

    def close(self) -> None:
        """Ends the record."""
        self._seams.close()
        self._hook.remove()
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
    rows = Rows(files.Writer(path, header_of(model, units)).write, every)
    return ValueRecord(seams_of(model, units, rows), rows)


def seams_of(model: nn.Module, units: Sequence[str], rows: Rows) -> ShardedSeams | PlainSeams:
    """Returns the seams of a model; `units` are those of a plain module."""
    if found := first_names(model):
        return ShardedSeams(found, rows)
    return PlainSeams(model, units, rows, alone=header_of(model, units).ranks == 1)


def header_of(model: nn.Module, units: Sequence[str]) -> files.Header:
    """Returns the facts about this rank; `units` are those of a plain module."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    contributors, copies = float(ranks), dict.fromkeys(("", *units), rank)
    if found := units_in(model):
        handles = {name: unit.handle for name, unit in found.items() if unit.handle is not None}
        copies = {name: handle.replicas.rank for name, handle in handles.items()}
        contributors = max([handle.contributors for handle in handles.values()], default=1.0)
    return files.Header(rank, ranks, contributors, copies, torch.__version__)


class ShardedSeams(PlugIn):
    """Records the values that the runtime tells of."""

    order = Precedence.VALUES

    def __init__(self, units: dict[Unit, str], rows: Rows) -> None:
        self._units, self._rows = units, rows
        self._schedules = {*map(schedule_of, units)}
        self._layouts: dict[Layout, Unit] = {}
        rows.at_end = self._look_at_updates

    def open(self) -> None:
        """Begins to look."""
        everywhere.attach(self)

    def close(self) -> None:
        """Ends looking."""
        everywhere.detach(self)

    def params(self) -> Iterable[nn.Parameter]:
        """Returns the sharded parameters."""
        return (param for unit in self._units for layout in unit.layouts for param in layout.sharded_params)

    def forward_opens(self, schedule: Any) -> None:
        if schedule in self._schedules:
            self._layouts = {each: unit for unit in self._units for each in unit.layouts}
            self._rows.begin_pass(torch.is_grad_enabled())

    def sees(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        if not self._rows.recording:
            return
        if seam is ValueSeam.REDUCED:
            self._look_at_reduced(owner, values)
        elif owner in self._units and current_transform() is None:
            recomputes = seam in (ValueSeam.INPUTS, ValueSeam.OUTPUTS) and graph_task() != -1
            if seam is ValueSeam.PARAMETERS:
                self._look_at_parameters(owner)
            elif seam is ValueSeam.GRADIENTS:
                row = self._rows.at(seam.value, self._units[owner])
                for name, grad in own_gradients(owner, self._units[owner]):
                    row.add(grad, name)
            elif not recomputes:
                row = self._rows.at(seam.value, self._units[owner])
                for value in values:
                    if value is not None:
                        row.add(value)

    def _look_at_parameters(self, unit: Unit) -> None:
        name, seam = self._units[unit], files.PARAMETER if graph_task() == -1 else files.AGAIN
        if self._rows.has(seam, name):
            return
        if seam == files.PARAMETER:
            self._look_at_shards(files.SHARD, unit, name)
        row = self._rows.at(seam, name)
        for fqn, param in full_params(unit, name):
            row.add(param, fqn)

    def _look_at_shards(self, seam: str, unit: Unit, name: str) -> None:
        row = self._rows.at(seam, name)
        for piece in shard_pieces(unit, name):
            row.add(piece.data, piece.fqn, piece.start)

    def _look_at_reduced(self, layout: Layout, values: Sequence[torch.Tensor | None]) -> None:
        unit = self._layouts.get(layout)
        if unit is None:
            return
        row = self._rows.at(files.REDUCED, self._units[unit])
        for reduced in values:
            if reduced is not None:
                for piece in gradient_pieces(unit, layout, self._units[unit], reduced):
                    row.add(piece.data, piece.fqn, piece.start)

    def _look_at_updates(self) -> None:
        for unit, name in self._units.items():
            self._look_at_shards(files.UPDATE, unit, name)
