"""Communication hooks: the user's own way of reducing gradients, registered and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import _ready_hooks as ready_made
from fsdp_wrap._communicators import make_communicator
from fsdp_wrap._compression import CompressedTransport
from fsdp_wrap._device import Pending, lane_of
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in

__all__ = ["register_comm_hook"]

_TORCH_HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"


class _Refused(AssertionError, RuntimeError):
    """What torch's wrapper refuses as the first of these, for programs that catch it."""


def register_comm_hook(module: nn.Module, state: object, hook: Callable[..., None]) -> None:
    """Lets a hook reduce the gradients of all units of a wrapped module.

    Nothing is divided by the number of ranks before: the hook averages. It runs in each backward outside of
    `no_sync`, once for each unit and dtype, on the stream of the reductions where there is one.

    Units whose parameters are sharded call `hook(state, grad, output)`: `output`, all zeros, is to get this
    rank's part of the average of `grad` over the ranks that the unit is sharded over. With hybrid strategies
    these are the ranks of the shard group (which `state` should name), and the results are averaged over
    the replicas afterwards. Units under NO_SHARD call `hook(state, grad)`, which averages in place.

    Args:
        module: The root wrapper.
        state: What the hook gets first.
        hook: The hook. Torch's own ones may be given.

    Raises:
        RuntimeError: Below the root, if there is a hook already (both are an `AssertionError` as well) or
            compressed reductions, inside a forward or backward, or while gradients wait that were accumulated
            under `no_sync`.
        ValueError: If `hook` cannot be called as the units will call it, or is a ready-made one and `state`
            names other ranks than a unit's gradients are to be averaged over.
    """
    units = list(units_in(module).values())
    _check_place(units)
    owning = {unit: unit.handle for unit in units if unit.handle is not None}
    _check_hook(hook, owning)
    if _is_ready_made(hook):
        _check_ranks(state, owning)
    for unit, handle in owning.items():
        alone = make_communicator(None, handle.communicator.device)
        replicas = handle.replicas if _is_sharded(handle) else alone
        handle.reduce_by(_HookedReduction(unit, handle, state, _working(hook)), replicas)


def _check_place(units: list[Unit]) -> None:
    if units[0].nested:
        raise _Refused(f"register_comm_hook() must be called on the root, and this is {units[0].name}")
    for unit in units:
        schedule_of(unit).require_idle("register_comm_hook()")
        if unit.handle is None:
            continue
        if unit.handle.has_own_reduction:
            raise _Refused(f"{unit.name} has a communication hook already, and takes one only")
        if isinstance(unit.handle.transport, CompressedTransport) and unit.handle.transport.reduces:
            raise RuntimeError(
                f"compress() compresses the reductions of {unit.name}, and a communication hook would take "
                "their place; call compress() without reductions first"
            )
        if unit.handle.holds_gradients:
            raise RuntimeError(
                f"{unit.name} holds gradients that no_sync() left unreduced; "
                "register a communication hook before the first backward"
            )


def _check_hook(hook: Any, handles: Mapping[Unit, ParamHandle]) -> None:
    if not callable(hook):
        raise ValueError(f"a communication hook must be callable, but is {hook!r}")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # not every callable tells
        return
    for unit, handle in handles.items():
        arguments = ("state", "grad", "output") if _is_sharded(handle) else ("state", "grad")
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise ValueError(
                f"{unit.name} will call the communication hook as hook({', '.join(arguments)}), which its "
                f"signature {signature} does not allow: {error}"
            ) from None


def _check_ranks(state: Any, handles: Mapping[Unit, ParamHandle]) -> None:
    group = getattr(state, "process_group", None)
    if group is None:
        raise ValueError(f"a ready-made hook needs a DefaultState or LowPrecisionState, not {state!r}")
    named = sorted(dist.get_process_group_ranks(group))
    for unit, handle in handles.items():
        needed = sorted((handle.communicator if _is_sharded(handle) else handle.replicas).members)
        if named != needed:
            raise ValueError(
                f"the hook has to average the gradients of {unit.name} over ranks {needed}, but the group of "
                f"its state has ranks {named}; make the state with that group, or where units differ write a "
                "hook that chooses"
            )


def _is_sharded(handle: ParamHandle) -> bool:
    return all(segment.layout.sharded for segment in handle.segments)


def _is_ready_made(hook: Callable[..., None]) -> bool:
    return getattr(hook, "__module__", "") in (ready_made.__name__, _TORCH_HOOKS)


def _working(hook: Callable[..., None]) -> Callable[..., None]:
    """Returns ours for those of torch's hooks that fail on the CPU."""
    if getattr(hook, "__module__", "") != _TORCH_HOOKS:
        return hook
    ours = {each.__name__: each for each in (ready_made.fp16_compress_hook, ready_made.bf16_compress_hook)}
    return ours.get(hook.__name__, hook)


class _HookedReduction:
    """The reduction of one unit by a hook (a `ReduceScatter`)."""

    def __init__(self, unit: Unit, handle: ParamHandle, state: object, hook: Callable[..., None]) -> None:
        self._name = unit.name  # not the unit, which holds this
        self._lane = lane_of(handle.communicator.device, "reduce")
        self._sharded = _is_sharded(handle)
        self._state, self._hook = state, hook

    def __call__(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        def run(_: bool) -> None:
            for shard, grad in zip(shards, full):
                self._reduce(shard, grad.data.to(shard.dtype))  # an alias: hooks may replace its data

        return self._lane.issue(run)

    def _reduce(self, shard: torch.Tensor, grad: torch.Tensor) -> None:
        expected = shard.shape
        if self._sharded:
            self._hook(self._state, grad, shard.zero_())
        else:
            self._hook(self._state, grad)
        result = shard if self._sharded else grad
        if result.shape != expected:
            raise RuntimeError(
                f"the communication hook left gradients of shape {tuple(result.shape)} for {self._name}; "
                f"they must keep {tuple(expected)}"
            )
        if not self._sharded:
            shard.copy_(grad)
