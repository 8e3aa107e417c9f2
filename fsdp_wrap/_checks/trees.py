"""The checks of each tree of units, and how others change gradients in spite of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from fsdp_wrap._checks.edits import UserEdits
from fsdp_wrap._checks.notes import StepNotes
from fsdp_wrap._checks.order import OrderCheck
from fsdp_wrap._checks.steps import StepChecks
from fsdp_wrap._core import PlugIn, Precedence, everywhere
from fsdp_wrap._runtime import Unit, schedule_of


class _TreeChecks(PlugIn):
    order = Precedence.CHECKS

    def made(self, step: Any) -> None:
        for plug_in in (UserEdits(), StepNotes(step.tree), OrderCheck(), StepChecks(step)):
            step.plug_ins.attach(plug_in)


everywhere.attach(_TreeChecks())


@contextmanager
def scaling_gradients(units: Iterable[Unit]) -> Iterator[None]:
    """Scales gradients of units while the context is open, by a factor that all ranks have agreed on."""
    schedules = dict.fromkeys(map(schedule_of, units))
    attached = chain.from_iterable(schedule.plug_ins.attached for schedule in schedules)
    trees = [plug_in for plug_in in attached if isinstance(plug_in, StepChecks)]
    unedited = [checks.parts for checks in trees if checks.parts is not None and not checks.edited]
    yield
    for parts in unedited:
        parts.accept()
