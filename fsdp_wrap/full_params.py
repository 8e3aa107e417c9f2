"""`summon_full_params`: full parameters in the user's hands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdp_wrap._handle import HandleState
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in

__all__ = ["dismiss", "full_units", "is_summoned", "summon", "summon_full_params"]


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
    with full_units(units, writeback=writeback):
        yield


@contextmanager
def full_units(units: Iterable[Unit], *, writeback: bool, copies: bool = False) -> Iterator[None]:
    """Shows the full parameters that units use; with `copies`, each in storage of its own.

    After an exception inside, nothing is written back.
    """
    summoned: list[Unit] = []
    try:
        for unit in units:
            summoned += summon(unit, copies)
        yield
    except BaseException:
        dismiss(summoned, writeback=False)
        raise
    dismiss(summoned, writeback)


def summon(unit: Unit, copies: bool = False) -> list[Unit]:
    """Summons what a unit uses and is not summoned yet, and returns that for `dismiss`."""
    summoned = []
    for each in (*unit.lenders, unit):
        if each.handle is not None and not is_summoned(each):
            each.handle.summon(copies)
            summoned.append(each)
    return summoned


def dismiss(units: Iterable[Unit], writeback: bool) -> None:
    """Takes full parameters back, all of them; if one cannot be written back, none is.

    Raises:
        ValueError: If a parameter was replaced by one of another shape or dtype.
    """
    units = list(units)
    edits: list[list[list[torch.Tensor]]] = [[] for _ in units]
    try:
        if writeback:
            edits = [each.handle.edits(f"{each.fqn}." if each.fqn else "") for each in units if each.handle]
    finally:
        for each, edited in zip(units, edits):
            assert each.handle is not None
            each.handle.dismiss(edited)


def is_summoned(unit: Unit) -> bool:
    """Whether the unit's full parameters are in the user's hands."""
    return unit.handle is not None and unit.handle.state is HandleState.SUMMONED
