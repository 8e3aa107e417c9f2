"""Forwards inside a transform of `torch.func`, whose tensors are of the transform's own kind.

Buffers cannot be written to and hooks cannot be registered there. So units are gathered and resharded outside
of all transforms, and modules compute with copies of the full parameters, so that a later use of the graph
needs no gather. Gradients reach the leaves through the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import reshard
from fsdp_wrap._core.torch_private import graph_task, outside_transforms
from fsdp_wrap._runtime import ForwardCall, Step, Unit, inside_transforms, step_of

_Copies = Sequence[Sequence[torch.Tensor]]
"""Copies of leaves, by segment."""

_running: WeakKeyDictionary[Step, list[ExitStack]] = WeakKeyDictionary()
"""What ends the forward calls in progress, by the tree of the unit that was called."""

_shown: WeakKeyDictionary[Unit, _Copies] = WeakKeyDictionary()
"""The copies that modules of units show now."""


@inside_transforms.fill
def run_transformed(units: Sequence[Unit], part: nn.Module | None, compute: Callable[[], Any]) -> Any:
    """Runs a forward call of units, or of one of their parts, inside a transform.

    A unit that does not reshard after its forward ends with the outermost one: modules around it may use it.
    """
    running, undo = _running.setdefault(step_of(units[-1]), []), ExitStack()
    running.append(undo)
    computed_with: list[tuple[Unit, _Copies]] = []
    try:
        with outside_transforms():
            for unit in units:
                step = step_of(unit)
                undo.callback(_exit, step, step.before_forward(unit, part))
                copies: _Copies = [[*map(_copy_leaf, segment.leaves)] for segment in unit.segments]
                computed_with.append((unit, copies))
                undo.callback(_show, unit, _show(unit, copies))
        output = compute()
        for unit, copies in computed_with:
            _refuse_written(unit, copies)
        return output
    finally:
        running.pop()
        with outside_transforms():
            if not running or units[-1].options.reshard_after_forward:
                undo.close()
            else:
                running[0].push(undo)


def _show(unit: Unit, copies: _Copies | None) -> _Copies | None:
    """Shows the modules copies of the leaves, or the leaves again; returns the copies shown before."""
    before = _shown.pop(unit, None)
    if copies is not None:
        _shown[unit] = copies
    for number, segment in enumerate(unit.segments):
        if copies is None:
            segment.params.display.leaves.show()
        else:
            segment.params.display.show_others(copies[number])
    return before


def _exit(step: Step, call: ForwardCall) -> None:
    step.exit_forward(call)
    if graph_task() == -1:  # a recomputation is resharded by its backward
        reshard(call.unit)


def _refuse_written(unit: Unit, copies: _Copies) -> None:
    for segment, of_segment in zip(unit.segments, copies):
        for fqn, copy in zip(segment.layout.fqns, of_segment):
            if copy._version:
                raise RuntimeError(
                    f"the forward of {unit.name} wrote to the parameter '{unit.name_of(fqn)}' in "
                    f"place on rank {dist.get_rank()}, which is lost: inside a transform of "
                    "torch.func it computes with a copy; edit parameters between steps (inside "
                    "summon_full_params, or each shard by itself)"
                )


def _copy_leaf(leaf: nn.Parameter) -> torch.Tensor:
    copy = leaf.clone()
    copy.__dict__.update(leaf.__dict__)
    copy._is_param = True  # for `isinstance(copy, nn.Parameter)` in modules
    return copy
