"""Private attributes of torch's flat parameters, their handles and wrappers that programs read, on ours.

They are computed when they are read. They differ from torch's in two ways. A flat parameter holds its shard
at all times, so during the computation of its unit programs get copies of the full values. And a unit may
have several flat parameters, each with a handle of its own. Names without a counterpart here are refused.

Importing this file adds the attributes to `FlatParameter` and to the wrapper, which know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fsdp_wrap._by_hand import require_idle, reshard
from fsdp_wrap._core import ShardingStrategy
from fsdp_wrap._core.torch_private import torch_common_utils, torch_flat_param
from fsdp_wrap._params import FlatParameter, FlatParams, HiddenFlatParameter, Where
from fsdp_wrap._runtime import Doing, Step, Unit, step_of
from fsdp_wrap._state import is_summoned
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FlatHandle"]

_INSTEAD = {
    "its gradient is `.grad`, on the device of the shard": (
        "prepare_gradient_for_backward prepare_gradient_for_optim"
    ),
    "there are no extensions": "_param_extensions",
    "use register_comm_hook(state, hook) of the root": "_comm_hook _comm_hook_state",
    "reshard() does all of it": "post_reshard",
    "use reshard(True)": "_use_sharded_views _free_unsharded_flat_param",
    "use summon_full_params": (
        "pre_unshard unshard post_unshard unflatten_as_params "
        "_use_unsharded_views _use_unsharded_flat_param _alloc_padded_unsharded_flat_param"
    ),
    "use summon_full_params(with_grads=True)": "unshard_grad reshard_grad",
    "use summon_full_params(offload_to_cpu=True)": "to_cpu",
    "the runtime orders its communication by itself": (
        "_unshard_stream _pre_unshard_stream _post_backward_stream _all_reduce_stream _default_stream "
        "_streams _free_event_queue _unshard_event"
    ),
    "see fsdp_wrap.record_events for the order in which units run": (
        "handles_pre_forward_order handles_post_forward_order"
    ),
}
"""Cure -> names of attributes that torch's objects have and ours cannot have."""


def _refuse(kind: str, name: str) -> None:
    """Raises AttributeError with a cure for a name of torch's; returns for any other name."""
    for instead, names in _INSTEAD.items():
        if name in names.split():
            raise AttributeError(f"fsdp_wrap has no '{name}' of a {kind}, as torch has: {instead}")


def _given_to(owner: type) -> Callable[[type], type]:
    """Copies the properties in the body of a class, which is never instantiated, to the class `owner`."""

    def give(body: type) -> type:
        for name, value in vars(body).items():
            if isinstance(value, (property, cached_property)):
                setattr(owner, name, value)
        return body

    return give


# flat parameters


def _params_of(param: FlatParameter) -> FlatParams:
    sharded = None if param._of_params is None else param._of_params()
    if sharded is None:
        raise AttributeError(
            f"this FlatParameter, of '{param._fqns[0]}' and others, is a copy, or its model is gone: read "
            "this from the parameter of a wrapped module"
        )
    return sharded


def _lies_elsewhere(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() != other.data_ptr() or one.dtype != other.dtype or one.device != other.device


@torch.no_grad()
def _copy_of_full(sharded: FlatParams) -> torch.Tensor:
    """Returns a copy of the unsharded buffer; an empty tensor while it is freed."""
    largest = max(sharded.leaves, key=torch.Tensor.numel)
    if not largest.untyped_storage().size():
        return largest.new_empty(0)
    full = largest.new_zeros(sharded.layout.full_numel)
    for view, leaf in zip(sharded.layout.views(full), sharded.leaves):
        view.copy_(leaf)
    return full


@_given_to(FlatParameter)
class _FlatParameter(FlatParameter):
    """Private attributes of flat parameters."""

    @property
    def _local_shard(self) -> torch.Tensor:
        """The shard: one object until it moves, as programs compare identities."""
        own = self if self._of_params is None else _params_of(self).flat_param
        if own.shard_alias is None or _lies_elsewhere(own.shard_alias, own):
            own.shard_alias = own.data
        return own.shard_alias

    @_local_shard.setter
    def _local_shard(self, shard: torch.Tensor) -> None:
        """Replaces the shard, as assigning `.data` does."""
        own = self if self._of_params is None else _params_of(self).flat_param
        if shard.shape != own.shape:
            raise ValueError(
                f"the shard of the FlatParameter of '{own._fqns[0]}' and others has shape "
                f"{tuple(own.shape)}; it cannot be replaced by a tensor of shape {tuple(shard.shape)}"
            )
        if _lies_elsewhere(shard, own):
            own.data = shard
        own.shard_alias = own.data

    @property
    def _mp_shard(self) -> torch.Tensor:
        """An empty tensor of the param dtype: the cast writes into the buffer that is gathered."""
        sharded = _params_of(self)
        leaf = sharded.leaves[0]
        if leaf.dtype == sharded.dtype:
            raise AttributeError(
                "a FlatParameter has '_mp_shard' only under MixedPrecision(param_dtype=...) of another dtype"
            )
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    @property
    def _full_param_padded(self) -> torch.Tensor:
        """A copy of the unsharded buffer; empty while it is freed."""
        sharded = _params_of(self)
        if not sharded.layout.sharded:
            raise AttributeError(
                "a FlatParameter has '_full_param_padded' only where it is sharded, and this one (NO_SHARD) "
                "is whole"
            )
        return _copy_of_full(sharded)

    @property
    def _shard_param_infos(self) -> tuple[Any, ...]:
        sharded = _params_of(self)
        infos = []
        for extent in sharded.layout.extents:
            start, stop = extent.within(sharded.layout.even.first, sharded.layout.shard_numel)
            first = sharded.layout.even.first + start - extent.start
            offsets = (start, stop - start, first, first + stop - start - 1) if stop > start else (None,) * 4
            infos.append(torch_flat_param._ShardParamInfo(stop > start, *offsets))
        return tuple(infos)

    @property
    def _param_infos(self) -> tuple[Any, ...]:
        sharded = _params_of(self)
        firsts = [next(iter(places)) for places in sharded.display.places]
        return tuple(
            torch_flat_param.ParamInfo(name, module, fqn.removesuffix(name).removesuffix("."))
            for (module, name), fqn in zip(firsts, sharded.layout.fqns)
        )

    @property
    def _params(self) -> list[nn.Parameter] | None:
        """The slices in the optimizer; None where it has the flat parameter itself."""
        sharded = _params_of(self)
        return None if sharded.sources[0] is sharded.flat_param else list(sharded.sources)


# handles


class FlatHandle:
    """One flat parameter of a wrapper, as `torch.distributed.fsdp._flat_param.FlatParamHandle`."""

    def __init__(self, wrapper: FullyShardedDataParallel, number: int) -> None:
        self._wrapper: Any = wrapper
        self._number = number

    def __getattr__(self, name: str) -> Any:
        _refuse("handle", name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {', '.join(self._owner.layout.fqns)}"

    _unit = property(attrgetter("_wrapper._unit"))
    _segment = property(lambda self: self._unit.buffers.segments[self._number])

    _shard = property(attrgetter("_segment.params.flat_param"))
    _owner = property(lambda self: _params_of(self._shard))

    @property
    def flat_param(self) -> FlatParameter:
        """The flat parameter: the shard, or while the unit computes a copy of the full values."""
        shard: FlatParameter = self._shard
        if not (self._segment.full.temporary and _computes(self._unit)):
            return shard
        full = _copy_of_full(self._owner)[: self._owner.layout.extents[-1].stop]
        shown = HiddenFlatParameter(full, shard.requires_grad, self._owner.layout.extents)
        shown._of_params = shard._of_params
        return shown

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Moves or casts the shard, by the arguments of `Tensor.to`; its gradient goes with it."""
        require_idle([self._unit], "flat_param_to()")
        if not self._unit.buffers.become_sharded():
            raise RuntimeError(
                f"flat_param_to() must not run inside summon_full_params, or while a state dict of "
                f"{self._unit.name} is taken or loaded"
            )
        self._shard.data = self._shard.data.to(*args, **kwargs)
        self._shard.shard_alias = None
        self._unit.buffers.follow_replaced()

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Frees the unit's full parameters, or only lets the modules show sharded ones."""
        unit = self._unit
        if free_unsharded_flat_param:
            reshard(unit)
        elif not unit.running:
            unit.buffers.shown.show_sharded()

    def needs_unshard(self) -> bool:
        """Whether the full parameters are freed."""
        return self._unit.buffers.where is Where.SHARDED and self.uses_sharded_strategy

    def _get_padded_unsharded_flat_param(self) -> Any:
        """Returns a copy of the unsharded buffer, or nothing while that is freed."""
        return self._shard._full_param_padded

    sharded_grad = property(attrgetter("_shard.grad"), doc="The gradient of the shard.")
    _use_orig_params = property(attrgetter("_wrapper._use_orig_params"))
    _offload_params = property(attrgetter("_wrapper.cpu_offload.offload_params"))

    uses_sharded_strategy = property(
        lambda self: self._wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD,
        doc="Whether each rank holds a shard of its own.",
    )

    def _follow_upcast(self, dtype: torch.dtype) -> None:
        if self._unit.buffers.where is Where.SHARDED:
            self._unit.buffers.follow_replaced()

    _orig_param_dtype = property(
        attrgetter("_shard.dtype"), _follow_upcast, doc="Dtype of the shard; accelerate assigns it."
    )


def _computes(unit: Unit) -> bool:
    """Whether a unit's forward or backward runs on its full parameters."""
    unsharded = bool(unit.params) and unit.buffers.where is Where.FULL
    return unsharded and unit.doing in (Doing.FORWARD, Doing.BACKWARD)


# wrappers


def _dissolve(step: Step) -> None:
    """Detaches the units of an idle step, which join another or a new one at their next use."""
    require_idle([step.root], "a change of _is_root")
    for unit in step.units:
        reshard(unit)
        unit.leave()


class _Order:
    """A wrapper's `_exec_order_data`."""

    def __init__(self, wrapper: FullyShardedDataParallel) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        _refuse("wrapper's _exec_order_data", name)
        raise AttributeError(f"a wrapper's _exec_order_data has no attribute '{name}'")

    all_handles = property(attrgetter("_wrapper._all_handles"), doc="In the order of the modules.")


_without_internals = FullyShardedDataParallel.__getattr__


def _getattr(self: FullyShardedDataParallel, name: str) -> Any:
    try:
        return _without_internals(self, name)
    except AttributeError:
        _refuse("wrapper", name)
        raise


FullyShardedDataParallel.__getattr__ = _getattr  # type: ignore[method-assign]


def _to_register(name: str) -> Any:
    def refuse(self: FullyShardedDataParallel, value: Any) -> None:
        raise RuntimeError(
            f"'{name}' of {self._unit.name} was set, which would have no effect: use "
            "register_comm_hook(state, hook) of the root"
        )

    return property(lambda _: _refuse("wrapper", name), refuse)


@_given_to(FullyShardedDataParallel)
class _Wrapper(FullyShardedDataParallel):
    """Private attributes of wrappers."""

    _comm_hook = _to_register("_comm_hook")
    _comm_hook_state = _to_register("_comm_hook_state")
    _use_orig_params = property(attrgetter("_settings.use_orig_params"))
    _state_dict_type = property(attrgetter("_state_dict_settings.state_dict_type"))
    _exec_order_data = property(_Order)

    @cached_property
    def _flat_handles(self) -> list[FlatHandle]:
        return [FlatHandle(self, number) for number in range(len(self._unit.segments))]

    params = property(
        lambda self: [handle.flat_param for handle in self._flat_handles],
        doc="The unit's `FlatParameter`s; while it computes, copies of what it computes with.",
    )
    _has_params = property(lambda self: bool(self._unit.params))

    @property
    def _handle(self) -> FlatHandle | None:
        """The flat parameter that clients may upcast: of several, one that trains in few bytes."""

        def rank(flat: FlatHandle) -> tuple[bool, int]:
            return not flat._shard.requires_grad, flat._shard.itemsize

        return min(self._flat_handles, key=rank, default=None)

    _flat_param = property(lambda self: None if self._handle is None else self._handle.flat_param)

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost instance; None before its first use."""
        step = self._unit.step
        return None if step is None else step.root is self._unit

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Lets an instance that was used alone, as a root, join the tree around it at the next forward."""
        if is_root:
            if step_of(self._unit).root is not self._unit:
                raise RuntimeError(
                    f"{self._unit.name} is no root, since another instance encloses it: set _is_root there"
                )
        elif self._is_root:
            _dissolve(step_of(self._unit))

    _all_handles = property(
        lambda self: [handle for wrapper in self.fsdp_modules(self) for handle in wrapper._flat_handles]
    )
    _device_handle = property(
        lambda self: torch_common_utils._FSDPDeviceHandle.from_device(self.compute_device)
    )

    @property
    def training_state(self) -> Any:
        """The unit's current use, as torch's enum."""
        uses = torch_common_utils.TrainingState
        if is_summoned(self._unit):
            return uses.SUMMON_FULL_PARAMS
        computes = self._unit.doing in (Doing.FORWARD, Doing.BACKWARD)
        return uses.FORWARD_BACKWARD if computes else uses.IDLE
