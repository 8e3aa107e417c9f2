"""`run_forward`: one forward call of a unit and of its companions (owners of tied parameters, tied units)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from fsdp_wrap._core import (
    NO_CASTS,
    Replaced,
    Seam,
    ValueSeam,
    cast_floating,
    iter_tensors,
    map_tensors,
    put_back,
)
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._params import Buffers
from fsdp_wrap._runtime.refusals import refuse_alone
from fsdp_wrap._runtime.step import Step
from fsdp_wrap._runtime.unit import ForwardCall, Unit, buffers_of

inside_transforms: Seam[Callable[[Sequence[Unit], nn.Module | None, Callable[[], Any]], Any]] = Seam(
    "transforms of torch.func", "fsdp_wrap._transforms"
)
"""Runs a forward call of units, or of one of their parts, inside a transform of `torch.func`."""


def step_of(unit: Unit) -> Step:
    """Returns a unit's step; makes one, with the unit as root, if it has none yet."""
    step = unit.step or Step(unit)
    assert isinstance(step, Step)
    return step


def run_forward(
    unit: Unit,
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: nn.Module | None = None,
) -> Any:
    """Runs `compute` as a forward of the unit, or of one of its parts, and of its companions.

    Without gradients a forward may run inside `summon_full_params`. It computes with the shown parameters,
    in master dtype and without communication, so a rank may run it alone.
    """
    if not torch.is_grad_enabled() and _shown_in_full(unit):
        unit.buffer_casts.hold_original()
        try:
            return compute(*args, **kwargs)
        finally:
            unit.buffer_casts.release()
    own = unit.step or step_of(unit)
    assert isinstance(own, Step)
    device = None if own.depth else own.device  # inputs of an outermost forward may be elsewhere
    replaced: Replaced = []
    calls: list[tuple[Step, ForwardCall, list[Node]]] = []
    try:
        if unit.tied_to is not None:
            refuse_alone(unit)
            return _compute(unit, own, device, compute, args, kwargs, replaced)
        if current_transform() is not None:
            within = partial(_compute, unit, own, device, compute, args, kwargs, replaced)
            return inside_transforms.needed("torch.func")([*unit.companions, unit], part, within)
        for runs in (*unit.companions, unit):
            step = runs.step or step_of(runs)
            assert isinstance(step, Step)
            calls.append((step, step.before_forward(runs, part), []))
        returned = None
        if unit.casts is not NO_CASTS or own.device.type != "cpu":
            returned, args, kwargs = unit.casts.prepare(unit is own.root, device, args, kwargs, replaced)
        for step, call, nodes in calls:
            args, kwargs = _watched_inputs(step, call, nodes, (args, kwargs), replaced)
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.INPUTS, [*iter_tensors((args, kwargs))])
        for act in unit.plug_ins.runs:
            act(unit, compute, args, kwargs)
        output = compute(*args, **kwargs)
        if returned is not None:
            output = cast_floating(output, returned)
        for step, call, nodes in calls:
            buffers = call.unit.buffers
            if buffers.params:
                output, tensors = _without_parameters(buffers, output)
                step.after_forward(call, tensors, nodes)
        if own.stays.waiting and own.depth == len(calls):
            output = _end_outermost(own, output)
        return output
    except BaseException as error:
        own.fail_forward(error, len(calls))
        raise
    finally:
        for step, call, _ in calls:
            step.exit_forward(call)
        if replaced:
            put_back(replaced, (args, kwargs))


def _compute(
    unit: Unit,
    step: Step,
    device: torch.device | None,
    compute: Callable[..., Any],
    args: Any,
    kwargs: Any,
    replaced: Replaced,
) -> Any:
    """Computes with inputs that are moved and cast; returns the output, cast."""
    returned, args, kwargs = unit.casts.prepare(unit is step.root, device, args, kwargs, replaced)
    output = compute(*args, **kwargs)
    return output if returned is None else cast_floating(output, returned)


def _watched_inputs(step: Step, call: ForwardCall, nodes: list[Node], inputs: Any, replaced: Replaced) -> Any:
    """Replaces inputs that need gradients by views, whose hooks tell when the gradients are done.

    Args:
        step: The step of the unit's tree.
        call: The forward call.
        nodes: List to which the views' nodes are added.
        inputs: Positional and keyword inputs.
        replaced: List to which the replaced tensors in containers are added.

    Returns:
        The inputs to compute with.
    """
    if not call.unit.buffers.params or call.unit.tied_to is not None or not torch.is_grad_enabled():
        return inputs
    seen: dict[int, torch.Tensor] = {}

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or tensor.layout != torch.strided:
            return tensor
        view = seen.get(id(tensor))
        if view is None:  # one tensor stays one: modules test `query is key`
            view = seen[id(tensor)] = tensor.view_as(tensor)
            assert view.grad_fn is not None
            view.grad_fn.register_prehook(partial(step.input_gradient_arrived, call))
            nodes.append(view.grad_fn)
        return view

    args, kwargs = inputs
    one = len(args) == 1 and isinstance(args[0], torch.Tensor)  # as most modules take
    args = (watch(args[0]),) if one else map_tensors(watch, args, replaced)
    inputs = args, kwargs and map_tensors(watch, kwargs, replaced)
    call.watched = len(nodes)
    return inputs


def _shown_in_full(unit: Unit) -> bool:
    """Returns whether the user sees all full parameters of the unit and its companions."""
    all_buffers = buffers_of((*unit.companions, unit))
    return bool(all_buffers) and all(buffers.lent.shows_full for buffers in all_buffers)


def _without_parameters(buffers: Buffers, output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Replaces a unit's parameters, and views of them, in a forward's output; returns it and its tensors.

    The caller gets copies, since the full parameters are freed. Gradients pass through the copies. A tensor
    that occurs twice stays one tensor. An edit changes the copy alone.
    """
    tensors = [output] if isinstance(output, torch.Tensor) else list(iter_tensors(output))
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and buffers.segments.owns_memory_of(tensor):
            copies[id(tensor)] = tensor.clone()
    if not copies:
        return output, tensors
    output = map_tensors(lambda value: copies.get(id(value), value), output)
    return output, list(iter_tensors(output))


def _end_outermost(step: Step, output: Any) -> Any:
    """Ends forward calls that wait for the outermost forward; returns its output without parameters."""
    if graph_task() != -1:
        return output
    for unit in step.stays.waiting:
        output, _ = _without_parameters(unit.buffers, output)
    step.end_outermost([*iter_tensors(output)])
    return output
