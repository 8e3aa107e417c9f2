"""The plug-ins that each tree of units gets when its step is made."""

from __future__ import annotations

from typing import Any

from fsdp_wrap._batching import Batching
from fsdp_wrap._checks import (
    ErrorNames,
    OrderCheck,
    OwnGradients,
    StepChecks,
    StepNotes,
    UserEdits,
    tell_of_freed,
)
from fsdp_wrap._comm import accelerator_of
from fsdp_wrap._core import PlugIn, everywhere
from fsdp_wrap._full_in_eval import FullInEval
from fsdp_wrap._offloading import Offloading


class _EachTree(PlugIn):
    def made(self, step: Any) -> None:
        units, accelerator = step.units, accelerator_of(step.device)
        step.plug_ins.attach(Batching())
        for check in (ErrorNames(), UserEdits(), StepNotes(step.tree), OrderCheck(), StepChecks(step)):
            step.plug_ins.attach(check)
        tell_of_freed(step)
        if any(unit.options.full_in_eval for unit in units):
            step.plug_ins.attach(FullInEval())
        if accelerator is not None and any(sharded.offloaded for unit in units for sharded in unit.params):
            step.plug_ins.attach(Offloading(units, accelerator))


everywhere.attach(_EachTree())
everywhere.attach(OwnGradients())
