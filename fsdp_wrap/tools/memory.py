"""What units held when memory ran out: told by the error itself.

Errors in a unit's forward, and in the gathers and reductions of a backward, say it by themselves, and so does
whatever `explain_memory_errors` encloses. An operator that fails in a backward is in nobody's hands but those
of who called `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp_wrap._core import Phase, Seam
from fsdp_wrap._params import HandleState, ParamHandle
from fsdp_wrap._runtime import Unit, out_of_memory, schedule_of
from fsdp_wrap.tools.models import Models, named_units

_HEADING = "The units of the model held then"
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")
"""What messages of torch's allocators have in them."""
_MOST = 24
"""Units that are told one by one."""

planned_memory: Seam[Callable[[Sequence[Unit]], Iterable[str]]] = Seam("plans", "fsdp_wrap.tools.planning")
"""Yields the lines of the plan that was made of some units, beside what they held; none without one."""


@contextmanager
def explain_memory_errors(models: Models) -> Iterator[None]:
    """Lets an error for lack of memory that leaves the context tell what the models' units held.

    That is so without it in forwards, and in the gathers and reductions of backwards. It is needed for what
    else of a step may fail: operators of a backward, the optimizer.

    Args:
        models: Wrapped or sharded, or with such modules inside.

    Raises:
        ValueError: If nothing in `models` is wrapped or sharded.

    Example:
        with fsdp_wrap.explain_memory_errors(model):
            loss(model(batch)).backward()
            optimizer.step()
    """
    units = named_units(models, "explain_memory_errors")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        tell_of_memory(error, units)
        raise


@out_of_memory.fill
def tell_of_memory(error: BaseException, units: Iterable[Unit]) -> None:
    """Adds to an error what units held when it was raised, if it is one for lack of memory.

    Args:
        error: It.
        units: Of one model, or of several.
    """
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
    """Yields what units hold now: in all, each of those that hold more than their shards, and the plan."""
    yield f"{_HEADING} (rank {dist.get_rank() if dist.is_initialized() else 0}, {_where(units)}):"
    rows = [_Held.of(unit.name, unit.handle) for unit in units if unit.handle is not None]
    holding = sum(row.full > 0 for row in rows)
    yield (
        f"  {_mib(sum(row.full for row in rows))} of full parameters in {holding} of {len(rows)} units, "
        f"{_mib(sum(row.gradients for row in rows))} of gradients on their way, "
        f"{_mib(sum(row.shards for row in rows))} of shards"
    )
    busy = sorted(
        (row for row in rows if row.full or row.gradients), key=lambda row: -row.full - row.gradients
    )
    for row in busy[:_MOST]:
        more = f", {_mib(row.gradients)} of gradients on their way" if row.gradients else ""
        yield f"  {row.name}: {row.state.value}, {_mib(row.full)} of full parameters{more}"
    if len(busy) > _MOST:
        yield f"  {len(busy) - _MOST} more units"
    if planned_memory.filled is not None:
        yield from planned_memory.filled(units)


class _Held(NamedTuple):
    """What a unit holds.

    Attributes:
        name: As messages name it.
        state: Of its parameters.
        full: Bytes of its full parameters.
        gradients: Bytes of gradients that are reduced, or wait for that.
        shards: Bytes of its shards.
    """

    name: str
    state: HandleState
    full: int
    gradients: int
    shards: int

    @classmethod
    def of(cls, name: str, handle: ParamHandle) -> _Held:
        unsharded = handle.state in (HandleState.UNSHARDING, HandleState.UNSHARDED, HandleState.SUMMONED)
        full = handle.unsharded_nbytes if unsharded else handle.kept_nbytes
        gradients = handle.reduced_nbytes if handle.reduction is not None or handle.accumulates else 0
        return cls(name, handle.state, full, gradients, sum(each.shard.nbytes for each in handle.segments))


def _where(units: Sequence[Unit]) -> str:
    """Says where the program is: in which forward, or whose backward."""
    running = [unit for unit in units if unit.running]
    if running:  # the innermost has the longest name
        return f"in the forward of {max(running, key=lambda unit: len(unit.fqn)).name}"
    schedules = {schedule_of(unit) for unit in units if unit.schedule is not None}
    if not any(schedule.phase is Phase.BACKWARD for schedule in schedules):
        return "between forward and backward"
    reached = [unit for unit in units if unit.reached]
    return f"in the backward of {reached[-1].name}" if reached else "in a backward"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
