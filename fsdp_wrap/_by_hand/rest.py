"""What users do between steps, when nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_wrap._building import REGISTRY
from fsdp_wrap._by_hand.backwards import end_failed_backward
from fsdp_wrap._core import NotIdleError, Seam, load_watchers
from fsdp_wrap._runtime import Step, Unit, step_of

joins: Seam[Callable[[nn.Module], Any]] = Seam("uneven ranks", "fsdp_wrap._uneven")
"""Returns what `torch.distributed.algorithms.Join` needs of a wrapper: `hook` and `group`."""


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Raises a `NotIdleError` inside a forward or backward of any of the units.

    Ends backwards and loads that raised, so that updates are done and full parameters are no longer shown.
    """
    for step in dict.fromkeys(map(step_of, units)):
        _require_rest(step, doing)


def _require_rest(step: Step, doing: str) -> None:
    running = next((unit for unit in step.units if unit.running), None)
    where = "a backward" if step.in_backward else ""
    if running is not None:
        where = f"the forward of {running.name}"
    elif not where and step.plug_ins.separate:
        where = "uneven() or Join: not all ranks may come here"
    if where:
        raise NotIdleError(f"{doing} must not run inside {where}")
    end_failed_backward(step)
    for act in dict.fromkeys(chain.from_iterable(unit.plug_ins.rests for unit in step.units)):
        act(step)


def note_change(units: Iterable[Unit], what: str, call: object) -> None:
    """Notes a change of values that all ranks must make; see `SameModel.note_change`."""
    for unit in units:
        step_of(unit).ranks.note_change(unit, what, call)


def _note_optimizer_load(optimizer: torch.optim.Optimizer) -> None:
    """Notes that an optimizer of some trees has loaded its state, as those of all ranks must."""
    loaded = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for step in {step_of(unit) for unit in REGISTRY.units() if unit.step is not None}:
        for unit in step.units:
            if any(id(param) in loaded for sharded in unit.params for param in sharded.sharded_params):
                note_change([unit], "optimizer load", call=loaded)


load_watchers.append(_note_optimizer_load)
