"""Out-of-memory errors that list the memory of the units.

The runtime passes errors of forwards, gathers and reductions through `tell_of_memory`. An operator that fails
in a backward raises in the caller of `backward()`; `explain_memory_errors` is for those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_wrap._checks import out_of_memory
from fsdp_wrap._core import Seam, format_bytes
from fsdp_wrap._params import Buffers, Where
from fsdp_wrap._runtime import Doing, Unit, step_of
from fsdp_wrap.tools.models import Models, named_units

_HEADING = "The units of the model held then"
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")
"""Parts of the messages of torch's allocators."""
_MOST = 24  # units that are listed

planned_memory: Seam[Callable[[Sequence[Unit]], Iterable[str]]] = Seam("plans", "fsdp_wrap.tools.planning")
"""Yields the lines of the plan of some units; none without one."""


@contextmanager
def explain_memory_errors(models: Models) -> Iterator[None]:
    """Adds the memory of the models' units to an out-of-memory error that leaves the context.

    Errors of forwards, and of the gathers and reductions of backwards, have it without this context. It is
    needed for the rest of a step: operators of a backward, and the optimizer.

    Args:
        models: Wrapped or sharded, or with such modules inside.

    Raises:
        ValueError: If nothing in `models` is wrapped or sharded.
    """
    units = named_units(models, "explain_memory_errors")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        tell_of_memory(error, units)
        raise


@out_of_memory.fill
def tell_of_memory(error: BaseException, units: Iterable[Unit]) -> None:
    """Adds the memory of units to an error, if memory ran out."""
    message = str(error)
    if not is_for_memory(error) or _HEADING in message:
        return
    live = [unit for unit in units if not unit.gone]
    error.args = ("\n".join([message or type(error).__name__, *memory_lines(live)]), *error.args[1:])


def is_for_memory(error: BaseException) -> bool:
    """Whether an error was raised because memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def memory_lines(units: Sequence[Unit]) -> Iterator[str]:
    """Yields lines about the units' memory now: in all, by unit that is not only sharded, and the plan."""
    yield f"{_HEADING} (rank {dist.get_rank() if dist.is_initialized() else 0}, {_where(units)}):"
    rows = [_UnitMemory.of(unit.name, unit.buffers) for unit in units if unit.params]
    full, gradients, shards = (
        format_bytes(sum(getattr(row, name) for row in rows)) for name in ("full", "gradients", "shards")
    )
    yield (
        f"  {full} of full parameters in {sum(row.full > 0 for row in rows)} of {len(rows)} units, "
        f"{gradients} of gradients on their way, {shards} of shards"
    )
    busy = sorted(
        (row for row in rows if row.full or row.gradients), key=lambda row: -row.full - row.gradients
    )
    for row in busy[:_MOST]:
        more = f", {format_bytes(row.gradients)} of gradients on their way" if row.gradients else ""
        yield f"  {row.name}: {row.where.value}, {format_bytes(row.full)} of full parameters{more}"
    if len(busy) > _MOST:
        yield f"  {len(busy) - _MOST} more units"
    if planned_memory.filled is not None:
        yield from planned_memory.filled(units)


class _UnitMemory(NamedTuple):
    """A unit's bytes of full parameters, of gradients in or before their reduction, and of shards."""

    name: str
    where: Where
    full: int
    gradients: int
    shards: int

    @classmethod
    def of(cls, name: str, buffers: Buffers) -> _UnitMemory:
        unsharded = buffers.where in (Where.GATHERING, Where.FULL) or buffers.lent.summoned
        full = buffers.segments.unsharded_nbytes if unsharded else 0
        held = buffers.gradients.reduction is not None or buffers.gradients.accumulated
        gradients = buffers.gradients.reduced_nbytes if held else 0
        return cls(
            name, buffers.where, full, gradients, sum(segment.shard.nbytes for segment in buffers.segments)
        )


def _where(units: Sequence[Unit]) -> str:
    """Returns where the program is, such as "in the backward of unit '3'"."""
    running = [unit for unit in units if unit.doing is Doing.FORWARD]
    if running:  # the innermost has the longest name
        return f"in the forward of {max(running, key=lambda unit: len(unit.fqn)).name}"
    steps = {step_of(unit) for unit in units if unit.step is not None}
    if not any(step.backward_open and not step.depth for step in steps):
        return "between forward and backward"
    reached = [unit for unit in units if unit.doing is Doing.BACKWARD]
    return f"in the backward of {reached[-1].name}" if reached else "in a backward"
