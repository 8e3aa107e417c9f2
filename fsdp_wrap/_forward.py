"""`run_forward`: one forward call of a unit, with those that lend it parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_wrap._precision import cast_floating, floating_dtype
from fsdp_wrap._schedule import Schedule, schedule_of
from fsdp_wrap._torch_private import current_transform
from fsdp_wrap._transforms import Transformed
from fsdp_wrap._tree import map_tensors
from fsdp_wrap._unit import Unit, Use

__all__ = ["prepared_inputs", "run_forward"]


def run_forward(
    unit: Unit,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: nn.Module | None = None,
) -> Any:
    """Runs `call` as a forward of the unit, or of one of its parts, and of those that lend it parameters.

    Without gradients it may run inside `summon_full_params`, and computes with what that shows, in master
    dtype and without communication: a rank may do so alone.

    Raises:
        RuntimeError: If the parameters are in the user's hands and gradients are enabled, or the forward
            has written to a parameter.
    """
    if not torch.is_grad_enabled() and _shown_in_full(unit):
        unit.buffers.hold_original()
        try:
            return call(*args, **kwargs)
        finally:
            unit.buffers.release()
    own, returned = unit.schedule or schedule_of(unit), None
    if unit.casts or own.device.type != "cpu":
        returned, args, kwargs = _prepared(unit, own, args, kwargs)
    if current_transform() is not None:
        output = _run_transformed(Transformed([*unit.lenders, unit], part), call, args, kwargs)
        return output if returned is None else cast_floating(output, returned)
    uses: list[tuple[Schedule, Use]] = []
    try:
        for lender in unit.lenders:
            schedule = schedule_of(lender)
            uses.append((schedule, schedule.pre_forward(lender, part)))
        uses.append((own, own.pre_forward(unit, part)))
        inputs = []
        for schedule, use in uses:
            args, kwargs, nodes = schedule.watch_inputs(use, args, kwargs)
            inputs.append(nodes)
        output = call(*args, **kwargs)
        if returned is not None:
            output = cast_floating(output, returned)
        for (schedule, use), nodes in zip(uses, inputs):
            output = schedule.post_forward(use, output, nodes)
        return output
    finally:
        for schedule, use in uses:
            schedule.exit_forward(use)


def _run_transformed(
    transformed: Transformed, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        transformed.enter()
        output = call(*args, **kwargs)
        transformed.require_unchanged()
        return output
    finally:
        transformed.exit()


def _prepared(
    unit: Unit, schedule: Schedule, args: Any, kwargs: Any
) -> tuple[torch.dtype | None, tuple[Any, ...], dict[str, Any]]:
    """Returns the dtype of the outputs, if that is given, and the inputs moved and cast."""
    device = schedule.device
    if schedule.depth == 0 and device.type != "cpu":  # inputs may be elsewhere
        args, kwargs = map_tensors(lambda each: each.to(device, non_blocking=True), (args, kwargs))
    casts = unit.options.casts
    if unit.options.full_in_eval and unit.leaves_mixed_precision:
        return None, args, kwargs
    returned = floating_dtype((args, kwargs)) if casts.restores_outputs else casts.outputs
    computed = casts.root if unit is schedule.root else casts.nested
    if computed is not None:
        args, kwargs = cast_floating(args, computed), cast_floating(kwargs, computed)
    return returned, args, kwargs


def prepared_inputs(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns inputs as a forward of the unit would take them, moved and cast."""
    _, args, kwargs = _prepared(unit, schedule_of(unit), args, kwargs)
    return args, kwargs


def _shown_in_full(unit: Unit) -> bool:
    """Whether the user holds the full parameters that the unit computes with."""
    handles = [each.handle for each in (*unit.lenders, unit) if each.handle is not None]
    return bool(handles) and all(handle.shows_full for handle in handles)
