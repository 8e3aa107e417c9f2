"""`summon_full_params`: full parameters in the user's hands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from fsdp_wrap._handle import HandleState, ParamHandle
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in

__all__ = ["dismiss", "full_unit", "is_summoned", "summon", "summon_full_params"]


@contextmanager
def summon_full_params(module: nn.Module, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Shows full parameters, in their original shapes, in place of the sharded ones.

    Collective: every rank enters and leaves. On leaving, each rank takes its part of what it sees; edits
    must therefore be the same on all ranks.

    Args:
        module: Any module; all units at and below it take part.
        recurse: Also the units below the outermost one.
        writeback: Keep edits of the parameters; otherwise they are forgotten.

    Raises:
        RuntimeError: Inside a forward, a backward, or another summon of the same unit.
        ValueError: On leaving, if a parameter was replaced by one of another shape or dtype.
    """
    units = [unit for unit in units_in(module).values() if recurse or unit.module is module]
    for unit in units:
        schedule_of(unit).require_idle("summon_full_params")
        if is_summoned(unit):
            raise RuntimeError(
                f"the parameters of {unit.name} are already shown in full by an enclosing summon_full_params"
            )
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(full_unit(unit, writeback=writeback))
        yield


@contextmanager
def full_unit(unit: Unit, *, writeback: bool, copies: bool = False) -> Iterator[None]:
    """Shows the full parameters that one unit uses; with `copies`, each in storage of its own.

    After an exception inside, nothing is written back.
    """
    handles = summon(unit, copies)
    try:
        yield
    except BaseException:
        dismiss(handles, writeback=False)
        raise
    dismiss(handles, writeback)


def summon(unit: Unit, copies: bool = False) -> list[ParamHandle]:
    """Summons what a unit uses and is not summoned yet, and returns that for `dismiss`."""
    handles = [each.handle for each in (*unit.lenders, unit) if each.handle is not None]
    summoned = [handle for handle in handles if handle.state is not HandleState.SUMMONED]
    for handle in summoned:
        handle.summon(copies)
    return summoned


def dismiss(handles: Iterable[ParamHandle], writeback: bool) -> None:
    """Takes full parameters back, all of them even if one cannot be written back."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.dismiss, writeback)


def is_summoned(unit: Unit) -> bool:
    """Whether the unit's full parameters are in the user's hands."""
    return unit.handle is not None and unit.handle.state is HandleState.SUMMONED
