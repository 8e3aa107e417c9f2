"""`Recorder`: tells a reader what passes the seams of a model's steps, by the names of units and parameters.

`UnitRecorder` is the only class here that attaches to the runtime. `PlainRecorder` in `plain.py` tells the
same of a module without units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, everywhere
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._params import ShardedParams, held_params
from fsdp_wrap._runtime import Step, Unit, step_of
from fsdp_wrap._values import files
from fsdp_wrap._values.pieces import (
    Piece,
    activations,
    full_params,
    keys_of,
    own_gradients,
    pieces_of,
    shard_pieces,
    step_pieces,
    whole_name,
)


class Reader:
    """Reads what passes the seams of a model's steps; a base that ignores all of it.

    Attributes:
        reads: Whether it reads the running forward and its backward.
    """

    reads = True

    def begin(self, step: Step | None) -> None:
        """Notes that an outermost forward begins; `step` is that of the units, None in a plain model.

        May communicate where all ranks run the forward, and may raise.
        """

    def see(self, seam: str, unit: str, pieces: Iterable[Piece]) -> None:
        """Looks at what passes a seam of a unit; the pieces are made as they are read."""

    def reduced(
        self, unit: str, sharded: ShardedParams, shard: torch.Tensor, pieces: Iterable[Piece]
    ) -> None:
        """Looks at a reduced gradient shard, and its pieces."""
        self.see(files.REDUCED, unit, pieces)

    def computes(self, unit: Unit, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Notes that a unit is about to compute: `compute(*args, **kwargs)`, with its leaves shown."""

    def sends(self, sharded: ShardedParams, full: torch.Tensor) -> None:
        """Notes that a reduce buffer is complete, as it will be sent."""

    def dropped(self) -> None:
        """Notes that a backward has raised, or the user has dropped what it left."""

    def end(self, step: Step) -> None:
        """Notes that a backward has ended; may communicate where all ranks run it, and may raise."""

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        """Notes that an optimizer, of any model, is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer, of any model, has stepped."""


class Recorder(ABC):
    """Tells a reader of a model's values and its optimizers' steps; answers the reader's questions.

    Attributes:
        reader: Gets what passes while this is open.
        units: Names of the units.
        is_reduced: Whether gradients are reduced; else a rank's own are all that there are.
        is_open: Whether this tells of all, not of steps alone.
    """

    units: Sequence[str]
    is_reduced = True
    is_open = False

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.attached = ExitStack()
        self._following = ExitStack()

    def follow(self) -> None:
        """Begins to tell the reader of optimizers' steps, and of nothing else."""
        self._following.callback(register_optimizer_step_post_hook(self._on_step).remove)

    def open(self) -> None:
        """Begins to tell the reader of values too, and of steps before they run."""
        self.is_open = True
        self.attached.callback(register_optimizer_step_pre_hook(self._before_step).remove)

    def close(self) -> None:
        """Stops telling of values; goes on telling of optimizers' steps."""
        self.is_open = False
        self.attached.close()

    def leave(self) -> None:
        """Stops telling the reader of anything."""
        self.close()
        self._following.close()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        self.reader.before_step(optimizer, closure)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.reader.stepped(optimizer)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of the model."""
        held = {*map(id, held_params(optimizer))}
        return any(id(param) in held for param in self.params())

    @abstractmethod
    def params(self) -> Iterable[nn.Parameter]:
        """Returns the parameters that an optimizer may hold."""

    @abstractmethod
    def shards(self, unit: str) -> Iterable[Piece]:
        """Returns the pieces of a unit's parameters on this rank."""

    @abstractmethod
    def step_gradients(self, unit: str, held: Set[object]) -> Iterable[Piece]:
        """Returns the pieces of gradients as an optimizer sees them, of the parameters with these keys."""

    @abstractmethod
    def keys(self, unit: str) -> Iterator[tuple[str, object]]:
        """Yields the names of a unit's original parameters, with keys of what an optimizer may hold."""


class UnitRecorder(Recorder, PlugIn):
    """Tells what the runtime shows of a model's units."""

    order = Precedence.VALUES

    def __init__(self, units: Mapping[Unit, str], reader: Reader) -> None:
        super().__init__(reader)
        self.units = [*units.values()]
        self.by_name = {name: unit for unit, name in units.items()}
        self.steps = [*dict.fromkeys(map(step_of, units))]
        self._names = units
        self._unit_of: dict[ShardedParams, str] = {}

    def open(self) -> None:
        super().open()
        self.attached.enter_context(everywhere.having(self))

    # moments

    def forward_opens(self, step: Step) -> None:
        if step in self.steps:
            self._unit_of = {sharded: name for unit, name in self._names.items() for sharded in unit.params}
            self.reader.begin(step)

    def sees(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        if seam is ValueSeam.REDUCED:
            name = self._unit_of.get(owner)
            if name is not None and values[0] is not None:
                pieces = pieces_of(self.by_name[name], name, owner, values[0])
                self.reader.reduced(name, owner, values[0], pieces)
        elif owner in self._names and current_transform() is None:
            name, recomputes = self._names[owner], graph_task() != -1
            if seam is ValueSeam.PARAMETERS:
                seen = files.AGAIN if recomputes else files.PARAMETER
                self.reader.see(seen, name, full_params(owner, name))
            elif seam is ValueSeam.GRADIENTS:
                self.reader.see(files.GRADIENT, name, own_gradients(owner, name))
            elif not (recomputes and seam in (ValueSeam.INPUTS, ValueSeam.OUTPUTS)):
                self.reader.see(seam.value, name, activations(values))

    def runs(self, unit: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if unit in self._names and graph_task() == -1 and current_transform() is None:
            self.reader.computes(unit, compute, args, kwargs)

    def sends(self, sharded: Any, full: torch.Tensor) -> None:
        if sharded in self._unit_of:
            self.reader.sends(sharded, full)

    def dropped(self, step: Step) -> None:
        if step in self.steps:
            self.reader.dropped()

    def backward_ended(self, step: Step) -> None:
        if step in self.steps:
            self.reader.end(step)

    # what a reader asks

    def params(self) -> Iterable[nn.Parameter]:
        return (param for unit in self._names for sharded in unit.params for param in sharded.sharded_params)

    def shards(self, unit: str) -> Iterable[Piece]:
        return shard_pieces(self.by_name[unit], unit)

    def updated(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Iterable[Piece]]]:
        """Yields the pieces of each unit's parameters that an optimizer has."""
        held = {*map(id, held_params(optimizer))}
        for unit, name in self._names.items():
            params = [
                sharded
                for sharded in unit.params
                if any(id(param) in held for param in sharded.sharded_params)
            ]
            if params:
                yield name, shard_pieces(unit, name, params)

    def step_gradients(self, unit: str, held: Set[object]) -> Iterable[Piece]:
        return step_pieces(self.by_name[unit], unit, held)

    def keys(self, unit: str) -> Iterator[tuple[str, object]]:
        for sharded in self.by_name[unit].params:
            for fqn, param in zip(sharded.layout.fqns, sharded.sources):
                yield from ((whole_name(unit, fqn), key) for key in keys_of(param, fqn))
