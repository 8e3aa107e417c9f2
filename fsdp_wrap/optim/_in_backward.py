"""`step_in_backward`: each unit is updated when its reduction is done, and its gradients go at once.

The optimizer is one for all units. For a unit it steps with groups and state that have just the unit's
parameters; between backwards it is what it always was, and so are its state dicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import HostLane, accelerator_of, host_lane_of
from fsdp_wrap._core import (
    SpanKind,
    count_step,
    counted_before,
    reason_against_pieces,
    warn_caller,
    warn_of_lost_decay,
)
from fsdp_wrap._params import ParamHandle
from fsdp_wrap._runtime import Unit, handles_of, require_idle, units_in
from fsdp_wrap._state import NormInParts, Originals, ShardedGradScaler, scale_to
from fsdp_wrap.optim._on_shards import AnyOptimizer, put_in_order
from fsdp_wrap.optim._unit_params import ScaledUnit, UnitParams


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
    units = [unit for unit in dict.fromkeys(units_in(model).values()) if unit.layouts]
    _check(model, units, max_norm, clip_value)
    params = _trained(model, units)
    optimizer = make_optimizer(params)
    _check_optimizer(model, optimizer, params)
    _check_scaler(scaler, params)
    steps = BackwardSteps(optimizer, units, max_norm, clip_value, scaler, _lane(units, in_thread))
    _known[optimizer] = weakref.ref(steps)
    return optimizer


def backward_steps(optimizer: torch.optim.Optimizer) -> BackwardSteps:
    """Returns the `BackwardSteps` of an optimizer that `step_in_backward` has returned.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: If it has not returned it.
    """
    steps = _known[optimizer]() if optimizer in _known else None
    if steps is None:
        raise ValueError(f"this {type(optimizer).__name__} was not made by step_in_backward")
    return steps


class BackwardSteps:
    """How the units of a model are updated while backwards go on; made by `step_in_backward`.

    Args:
        optimizer: The optimizer.
        units: The units of the model.
        max_norm: See `step_in_backward`.
        clip_value: See `step_in_backward`.
        scaler: See `step_in_backward`.
        lane: Where the updates run; None for the thread of the backward.

    Attributes:
        total_norm: The last finite norm of all gradients, before clipping, with `max_norm`: 0-d, float64, the
            same on all ranks. None before the first backward.
        communicates: Whether updates do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        max_norm: float | None,
        clip_value: float | None,
        scaler: GradScaler | None,
        lane: HostLane | None,
    ) -> None:
        self._updated: list[str] = []
        self.total_norm: torch.Tensor | None = None
        self.communicates = scaler is not None and scaler.is_enabled()
        self._max_norm, self._clip_value, self._scaler, self._lane = max_norm, clip_value, scaler, lane
        self._optimizer = optimizer
        self._parts: MutableMapping[Unit, UnitParams] = WeakKeyDictionary()
        self._overflowed = self._began = False
        self._entries = 0  # of the optimizer's state, when it was put in order
        self._scaled: MutableMapping[Unit, ScaledUnit] = WeakKeyDictionary()
        theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for unit in units:
            params = [param for param in _sharded(unit) if id(param) in theirs]
            if params:
                self._parts[unit] = UnitParams(optimizer, params)
                unit.updater = self
        handles = handles_of(self._parts)
        self._norm = NormInParts(handles) if max_norm is not None and handles else None

    @property
    def updated(self) -> list[str]:
        """Names of the units that the running backward has updated, or the last one has.

        Waits for updates in a thread: after a backward that raised they may still go on.
        """
        if self._lane is not None:
            self._lane.settle()
        return self._updated

    @property
    def waits(self) -> bool:
        """Whether units of the running backward are updated at its end: no norm is known before."""
        return self._norm is not None and self.total_norm is None

    def remove(self) -> None:
        """Ends it: from the next backward on gradients stay, and the optimizer's own `step` is to be called.

        Raises:
            RuntimeError: Inside a forward or backward.
        """
        require_idle(self._parts, "remove()")
        for unit in [*self._parts]:
            unit.updater = None
            del self._parts[unit]
        _known.pop(self._optimizer, None)

    # what the schedule calls

    def begin(self) -> None:
        """A backward begins."""
        self._updated, self._overflowed, self._began = [], False, False
        if self._norm is not None:
            self._norm.forget()  # what one that failed has left

    def update(self, unit: Unit, arrive: Callable[[], None] | None) -> None:
        """Updates a unit, after `arrive`, if given, has added its gradients to the sharded parameters.

        Args:
            unit: The unit.
            arrive: Adds the gradients that the reduction has brought.
        """
        part, handle, norm = self._parts[unit], unit.handle, self.total_norm
        self._began = True
        if not self.communicates:
            self._issue(partial(self._apply, unit, part, norm, handle, arrive))
            return
        if arrive is not None:
            arrive()
        self._unscale(unit)
        self._step_scaled(unit, partial(self._apply, unit, part, norm, handle))

    def finish(self, left: Sequence[Unit]) -> None:
        """All gradients are there: updates the units that are left, and waits for all updates.

        Args:
            left: The units that were not updated.
        """
        waits = self.waits
        if waits:
            self._update_all(left)
        else:
            for unit in left:
                self.update(unit, None)
        if self._lane is not None:
            self._lane.finish()
        if self._norm is not None and not waits:
            self._take_norm(self._norm)
        for part in self._parts.values():
            part.commit()
        state = self._optimizer.state
        if len(state) != self._entries:  # units were updated in the order of the backward
            self._entries = len(state)
            groups = self._optimizer.param_groups
            put_in_order(state, [param for group in groups for param in group["params"]])

    def abandon(self, left: Sequence[Unit]) -> None:
        """The backward has failed: waits for what was begun, and drops the gradients of other units.

        Args:
            left: The units that were not updated.
        """
        if self._lane is not None:
            self._lane.abandon()
        for unit in left:
            self._parts[unit].free()
        if self.updated:
            warn_caller(
                f"a backward raised after {len(self.updated)} of {len(self._parts)} units had been updated "
                f"(step_in_backward) on rank {dist.get_rank()}: {', '.join(self.updated)}; the others have "
                "kept their values: load a checkpoint, or go on with the next batch"
            )

    # steps that several of the above share

    def _issue(self, work: Callable[[], None]) -> None:
        # Counted here, where all ranks are alike: steps outdate what is kept, and a thread takes them at any
        # time.
        count_step()
        if self._lane is None:
            work()
        else:
            self._lane.issue(work)

    def _apply(self, unit: Unit, *work: Any) -> None:
        """Updates a unit, as `_clip_and_step` says."""
        beside = self._lane is not None
        with unit.plug_ins.span(SpanKind.UPDATE, None, (unit,), beside=beside), counted_before():
            self._clip_and_step(unit.name, *work)

    @torch.no_grad()
    def _clip_and_step(
        self,
        name: str,
        part: UnitParams,
        norm: torch.Tensor | None,
        handle: ParamHandle | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        """Clips the gradients of a unit, lets the optimizer step with them, and frees them."""
        if arrive is not None:
            arrive()
        try:
            if self._norm is not None and handle is not None:
                self._norm.add(handle)
            if norm is not None and self._max_norm is not None:
                scale_to(part.gradients(), norm, self._max_norm)
            if self._clip_value is not None:
                for grad in part.gradients():
                    grad.clamp_(-self._clip_value, self._clip_value)
            if part.has_gradients:
                part.step()
                self._updated.append(name)
        finally:
            part.free()

    @torch.no_grad()
    def _update_all(self, left: Sequence[Unit]) -> None:
        """Updates all units of a backward by their own norm, which is the next one's as well."""
        assert self._norm is not None
        if not left:
            return
        for unit in left:
            if self.communicates:
                self._unscale(unit)
            self._norm.add(unit.handle)
        total = self._norm.total()
        if total.isfinite():
            self.total_norm = total
        elif self.communicates:
            self._overflowed = True
        for unit in left:
            work = partial(self._apply, unit, self._parts[unit], total)
            if self.communicates:
                self._step_scaled(unit, work)
            else:
                self._issue(work)

    def _take_norm(self, norm: NormInParts) -> None:
        """Takes the norm of the backward that ends, all ranks alike, if it is one."""
        before = self.total_norm
        if self._overflowed or not self._began or before is None:
            norm.forget()
            return
        total = norm.total()
        self.total_norm = torch.where(total.isfinite(), total, before)

    def _unscale(self, unit: Unit) -> None:
        """Divides the gradients of a unit by the scale; collective."""
        if self._scaler is not None and not self._overflowed and self._parts[unit].has_gradients:
            self._scaler.unscale_(self._scaled_of(unit))

    def _step_scaled(self, unit: Unit, work: Callable[[], None]) -> None:
        """Does the work for a unit if no gradient of it has overflowed, nor one of a unit before it."""
        part = self._parts[unit]
        if self._scaler is None or not part.has_gradients:
            return
        scaled = self._scaled_of(unit)
        if not self._overflowed:
            scaled.offer(partial(self._issue, work))
            self._scaler.step(scaled)
            self._overflowed = not scaled.stepped
        if self._overflowed:
            part.free()

    def _scaled_of(self, unit: Unit) -> Any:
        """Returns the unit's parameters in the form that the scaler takes."""
        if unit not in self._scaled:
            self._scaled[unit] = ScaledUnit(self._parts[unit])
        return self._scaled[unit]


_known: MutableMapping[torch.optim.Optimizer, weakref.ref[BackwardSteps]] = WeakKeyDictionary()
"""The `BackwardSteps` of optimizers: units hold them, and they hold the optimizer."""


def _sharded(unit: Unit) -> list[nn.Parameter]:
    """Returns the sharded parameters of a unit."""
    return [param for layout in unit.layouts for param in layout.sharded_params]


def _trained(model: nn.Module, units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the sharded parameters that need gradients, in the model's order."""
    owned = {id(param): param for unit in units for param in _sharded(unit) if param.requires_grad}
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
        if unit.updater is not None:
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
    layouts = [layout for unit in units for layout in unit.layouts]
    device = next(handle.communicator.device for handle in handles_of(units))
    accelerator = accelerator_of(device)
    shards = [layout.flat_param.data for layout in layouts]
    on_host = all(accelerator is None or accelerator.is_on_host(shard) for shard in shards)
    if in_thread and not on_host:
        raise ValueError(
            "in_thread=True needs all shards in host memory: offload the parameters of all units"
        )
    offloaded = all(layout.offloaded for layout in layouts)
    return host_lane_of(device) if (offloaded and on_host if in_thread is None else in_thread) else None
