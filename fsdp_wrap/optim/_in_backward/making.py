"""`step_in_backward`: looks at model and optimizer, and begins to update units in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import HostLane, accelerator_of, host_lane_of
from fsdp_wrap._core import reason_against_pieces, warn_of_lost_decay
from fsdp_wrap._runtime import Unit, buffers_of, units_in
from fsdp_wrap._state import Originals, ShardedGradScaler
from fsdp_wrap.optim._in_backward.steps import BackwardSteps, sharded_params, steps_of
from fsdp_wrap.optim._on_shards import AnyOptimizer


def step_in_backward(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], AnyOptimizer],
    *,
    max_norm: float | None = None,
    clip_value: float | None = None,
    scaler: GradScaler | None = None,
    in_thread: bool | None = None,
) -> AnyOptimizer:
    """Lets each unit be updated in the backward, as soon as its gradients are reduced, and frees these.

    So the gradients of no more than two units exist. A backward is a step: there is no `optimizer.step()` to
    call, and to call it changes nothing. A backward under `no_sync` (or the like) is none. A unit whose
    forward ran more than once since the last backward is updated when the backward ends. So is one of which
    an output gets its gradient after all parameters have theirs, and what is left then. Schedulers, state
    dicts and checkpoints take the optimizer as if it stepped after the backward.

    All ranks must call this alike.

    Args:
        model: Wrapped, or sharded by `fully_shard`.
        make_optimizer: Makes the optimizer of the sharded parameters that need gradients, in the order of
            `model.parameters()`. It may make groups of them, and leave some out, which are not updated here.
            Each update must depend on nothing but its parameter, that one's gradient and state, and the
            group.
        max_norm: Clips by the total norm, before clipping, of the last backward: that of the running one is
            not known before its end. The first backward, which knows none, updates at its end, and clips by
            its own. A norm that is not finite is never taken for the next.
        clip_value: The most that an element of a gradient may be, after `max_norm`, by its absolute value.
        scaler: The scaler of the loss: with parameters that are no `DTensor`s a `ShardedGradScaler`. A unit
            whose gradients overflow is not updated on any rank, nor are those that come after it in the same
            backward; those before it have been. Only `scaler.update()` is left to call.
        in_thread: Whether updates run in a thread beside the backward, on the host, where all shards must be
            then. None for offloaded shards alone.

    Returns:
        The optimizer of `make_optimizer`; `backward_steps` tells how it goes.

    Raises:
        TypeError: If `make_optimizer` returns no `torch.optim.Optimizer`.
        ValueError: If nothing in `model` is wrapped or sharded, a unit is updated in backward already, an
            argument is out of its range, or the optimizer has other parameters than it was given, is
            differentiable, or needs a closure.
        RuntimeError: Inside a forward or backward.
    """
    units = [unit for unit in dict.fromkeys(units_in(model).values()) if unit.params]
    _check(model, units, max_norm, clip_value)
    params = _trained(model, units)
    optimizer = make_optimizer(params)
    _check_optimizer(model, optimizer, params)
    _check_scaler(scaler, params)
    steps = BackwardSteps(optimizer, units, max_norm, clip_value, scaler, _lane(units, in_thread))
    steps_of[optimizer] = weakref.ref(steps)
    return optimizer


def backward_steps(optimizer: torch.optim.Optimizer) -> BackwardSteps:
    """Returns the `BackwardSteps` of an optimizer that `step_in_backward` has returned.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: If it has not returned it.
    """
    steps = steps_of[optimizer]() if optimizer in steps_of else None
    if steps is None:
        raise ValueError(f"this {type(optimizer).__name__} was not made by step_in_backward")
    return steps


def _trained(model: nn.Module, units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the sharded parameters that need gradients, in the model's order."""
    owned = {id(param): param for unit in units for param in sharded_params(unit) if param.requires_grad}
    ordered = [owned.pop(id(param)) for param in model.parameters() if id(param) in owned]
    return [*ordered, *owned.values()]


def _check(model: nn.Module, units: Sequence[Unit], max_norm: float | None, clip_value: float | None) -> None:
    if not units:
        raise ValueError(
            f"{type(model).__name__} has no wrapped or sharded module with parameters: pass the model that "
            "has"
        )
    require_idle(units, "step_in_backward()")
    for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, but is {value}")
    for unit in units:
        if unit.plug_ins.updates(unit):
            raise ValueError(
                f"{unit.name} is updated in backward already: call backward_steps(optimizer).remove() before"
            )


def _check_optimizer(model: nn.Module, optimizer: Any, given: Sequence[nn.Parameter]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"make_optimizer must return a torch.optim.Optimizer, not a {type(optimizer).__name__}"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"{kind} computes with all gradients, and needs a closure: it cannot step in backward"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"this {kind} is differentiable, and backward has no graph: make it without")
    reason = reason_against_pieces(optimizer)  # which steps, perhaps in a thread, must not find out
    if reason is not None:
        raise ValueError(f"this {kind} {reason}")
    warn_of_lost_decay(optimizer)
    known = {*map(id, given)}
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if id(param) not in known:
            raise ValueError(
                f"the {kind} of make_optimizer has {Originals(model).describe(param)}, which it was not "
                "given: no unit would update it; give it to another optimizer, which steps after the backward"
            )


def _check_scaler(scaler: GradScaler | None, params: Iterable[nn.Parameter]) -> None:
    if scaler is None or isinstance(scaler, ShardedGradScaler) or not scaler.is_enabled():
        return
    if dist.get_world_size() > 1 and not all(isinstance(param, DTensor) for param in params):
        raise ValueError(
            f"a {type(scaler).__name__} would let ranks disagree on whether a unit has overflowed: pass a "
            "fsdp_wrap.ShardedGradScaler"
        )


def _lane(units: Iterable[Unit], in_thread: bool | None) -> HostLane | None:
    """Returns the lane for updates beside the backward, or None."""
    params = [sharded for unit in units for sharded in unit.params]
    device = next(buffers.communicator.device for buffers in buffers_of(units))
    accelerator = accelerator_of(device)
    shards = [sharded.flat_param.data for sharded in params]
    on_host = all(accelerator is None or accelerator.is_on_host(shard) for shard in shards)
    if in_thread and not on_host:
        raise ValueError(
            "in_thread=True needs all shards in host memory: offload the parameters of all units"
        )
    offloaded = all(sharded.offloaded for sharded in params)
    return host_lane_of(device) if (offloaded and on_host if in_thread is None else in_thread) else None
