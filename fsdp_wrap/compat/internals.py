"""What torch's flat parameters, their handles and wrappers carry under private names, and programs read.

All of it is computed when it is asked for, from what our runtime has. It differs from torch's in two ways. A
flat parameter holds its shard at all times: what is read of a unit while it computes are copies of the values
that it computes with. And a unit may have several flat parameters, each with a handle of its own. What our
runtime has no counterpart of is refused by name.

Importing this file gives the attributes to `FlatParameter` and to the wrapper, which know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp_wrap._core import Place, ShardingStrategy, clean_fqn
from fsdp_wrap._core.torch_private import graph_task, torch_common_utils, torch_flat_param
from fsdp_wrap._params import FlatLayout, FlatParameter, HandleState, HiddenFlatParameter
from fsdp_wrap._runtime import Schedule, Unit, schedule_of
from fsdp_wrap._state import is_summoned
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FlatHandle"]

_INSTEAD = {
    "its gradient is `.grad`, on the device of the shard": (
        "_cpu_grad _saved_grad_shard prepare_gradient_for_backward prepare_gradient_for_optim"
    ),
    "use register_post_accumulate_grad_hook on the sharded parameter": "_post_backward_hook_state",
    "there are no extensions": "_param_extensions",
    "use register_comm_hook(state, hook) of the root": "_comm_hook _comm_hook_state",
    "reshard() does all of it": "post_reshard",
    "use reshard(True)": "_use_sharded_views _free_unsharded_flat_param",
    "use summon_full_params": (
        "_full_prec_full_param_padded pre_unshard unshard post_unshard unflatten_as_params "
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
"""What to do, by the names of what torch's objects have and ours cannot."""


def _refuse(kind: str, name: str) -> None:
    """Refuses what torch's objects have and ours cannot; what neither has is left to the caller.

    Raises:
        AttributeError: Saying what to use instead.
    """
    for instead, names in _INSTEAD.items():
        if name in names.split():
            raise AttributeError(f"fsdp_wrap has no '{name}' of a {kind}, as torch has: {instead}")


_Body = TypeVar("_Body", bound=type)


def _given_to(owner: type) -> Callable[[_Body], _Body]:
    """Gives the properties in the body of a class, which is never instantiated, to the class `owner`."""

    def give(body: _Body) -> _Body:
        for name, value in vars(body).items():
            if isinstance(value, (property, cached_property)):
                setattr(owner, name, value)
        return body

    return give


# flat parameters


def _layout_of(param: FlatParameter) -> FlatLayout:
    layout = None if param.of_layout is None else param.of_layout()
    if layout is None:
        raise AttributeError(
            f"this FlatParameter, of '{param._fqns[0]}' and others, is a copy, or its model is gone: read "
            "this from the parameter of a wrapped module"
        )
    return layout


def _lies_elsewhere(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() != other.data_ptr() or one.dtype != other.dtype or one.device != other.device


@torch.no_grad()
def _copy_of_full(layout: FlatLayout) -> torch.Tensor:
    """A copy of the unsharded buffer; nothing while that is freed."""
    largest = max(layout.leaves, key=torch.Tensor.numel)
    if not largest.untyped_storage().size():
        return largest.new_empty(0)
    full = largest.new_zeros(layout.full_numel)
    for view, leaf in zip(layout.views(full), layout.leaves):
        view.copy_(leaf)
    return full


def _sharded_layout_of(param: FlatParameter, name: str) -> FlatLayout:
    layout = _layout_of(param)
    if not layout.sharded:
        raise AttributeError(
            f"a FlatParameter has '{name}' only where it is sharded, and this one (NO_SHARD) is whole"
        )
    return layout


def _other_places(layout: FlatLayout) -> Iterator[tuple[int, Place]]:
    """Yields the places of tied parameters beside the first, with their parameter's number."""
    for index, places in enumerate(layout.places):
        for place in list(places)[1:]:
            yield index, place


def _stretches(param: FlatParameter) -> Iterator[tuple[int, bool]]:
    """Yields the element counts of parameters and of the gaps between them, in order, with which are gaps."""
    end = 0
    for extent in _layout_of(param).extents:
        if extent.start > end:
            yield extent.start - end, True
        yield extent.stop - extent.start, False
        end = extent.stop


def _stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _absent(name: str) -> Any:
    return property(lambda _: _refuse("FlatParameter", name))


@_given_to(FlatParameter)
class _FlatParameter(FlatParameter):
    """The private attributes of torch's flat parameters."""

    _cpu_grad = _absent("_cpu_grad")
    _saved_grad_shard = _absent("_saved_grad_shard")
    _post_backward_hook_state = _absent("_post_backward_hook_state")
    _full_prec_full_param_padded = _absent("_full_prec_full_param_padded")

    @property
    def _local_shard(self) -> torch.Tensor:
        """The shard: one object as long as it lies at one place, as programs compare identities."""
        own = self if self.of_layout is None else _layout_of(self).flat_param
        if own.shard_alias is None or _lies_elsewhere(own.shard_alias, own):
            own.shard_alias = own.data
        return own.shard_alias

    @_local_shard.setter
    def _local_shard(self, shard: torch.Tensor) -> None:
        """Takes over another shard, as assigning `.data` does."""
        own = self if self.of_layout is None else _layout_of(self).flat_param
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
        """Nothing, in the param dtype: the cast writes into the buffer that travels."""
        layout = _layout_of(self)
        leaf = layout.leaves[0]
        if leaf.dtype == layout.dtype:
            raise AttributeError(
                "a FlatParameter has '_mp_shard' only under MixedPrecision(param_dtype=...) of another dtype"
            )
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    _full_param_padded = property(lambda self: _copy_of_full(_sharded_layout_of(self, "_full_param_padded")))
    _padded_unsharded_size = property(
        lambda self: torch.Size([_sharded_layout_of(self, "_padded_unsharded_size").full_numel])
    )
    _unpadded_unsharded_size = property(lambda self: torch.Size([_layout_of(self).extents[-1].stop]))
    _sharded_size = property(lambda self: self._local_shard.size())

    @property
    def _shard_numel_padded(self) -> int:
        layout = _layout_of(self)
        beyond = layout.first + layout.shard_numel - layout.extents[-1].stop
        return min(layout.shard_numel, max(0, beyond))

    @property
    def _shard_param_infos(self) -> tuple[Any, ...]:
        layout = _layout_of(self)
        infos = []
        for extent in layout.extents:
            start, stop = extent.within(layout.first, layout.shard_numel)
            first = layout.first + start - extent.start
            found = (start, stop - start, first, first + stop - start - 1) if stop > start else (None,) * 4
            infos.append(torch_flat_param._ShardParamInfo(stop > start, *found))
        return tuple(infos)

    @property
    def _param_infos(self) -> tuple[Any, ...]:
        layout = _layout_of(self)
        firsts = [next(iter(places)) for places in layout.places]
        return tuple(
            torch_flat_param.ParamInfo(name, module, fqn.removesuffix(name).removesuffix("."))
            for (module, name), fqn in zip(firsts, layout.fqns)
        )

    @property
    def _shared_param_infos(self) -> tuple[Any, ...]:
        layout, firsts = _layout_of(self), self._param_infos
        names = {module: clean_fqn(name) for name, module in layout.module.named_modules()}
        return tuple(
            torch_flat_param.SharedParamInfo(name, module, names.get(module, ""), *firsts[index])
            for index, (module, name) in _other_places(layout)
        )

    @property
    def _params(self) -> list[nn.Parameter] | None:
        """The slices that the optimizer sees; None where it sees the flat parameter."""
        layout = _layout_of(self)
        return None if layout.sources[0] is layout.flat_param else list(layout.sources)

    _shared_params = property(
        lambda self: self._params and [self._params[index] for index, _ in _other_places(_layout_of(self))]
    )
    _is_grad_none_mask = property(lambda self: self._params and [each.grad is None for each in self._params])

    _num_params = property(lambda self: len(self._fqns))
    _numels_with_padding = property(lambda self: tuple(numel for numel, _ in _stretches(self)))
    _is_padding_mask = property(lambda self: [padding for _, padding in _stretches(self)])
    _strides = property(lambda self: tuple(map(_stride, self._shapes)))
    _contiguities = property(lambda self: (True,) * len(self._fqns))
    _modules = property(lambda self: {module for places in _layout_of(self).places for module, _ in places})


# handles


class FlatHandle:
    """One flat parameter of a wrapper, as `torch.distributed.fsdp._flat_param.FlatParamHandle`.

    Args:
        wrapper: The wrapper.
        number: Of the flat parameter among the wrapper's.
    """

    def __init__(self, wrapper: FullyShardedDataParallel, number: int) -> None:
        self._wrapper: Any = wrapper
        self._number = number

    def __getattr__(self, name: str) -> Any:
        _refuse("handle", name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {', '.join(self._layout.fqns)}"

    _unit = property(attrgetter("_wrapper._unit"))
    _segment = property(lambda self: self._unit.handle.segments[self._number])

    @property
    def _shard(self) -> _FlatParameter:
        param: _FlatParameter = self._segment.layout.flat_param
        return param

    _layout = property(lambda self: _layout_of(self._shard))

    @property
    def flat_param(self) -> FlatParameter:
        """The flat parameter: the shard, or while the unit computes a copy of the full values."""
        shard, layout = self._shard, self._layout
        if not (self._segment.full.temporary and _computes(self._unit)):
            return shard
        full = _copy_of_full(layout)[: layout.extents[-1].stop]
        shown = HiddenFlatParameter(full, shard.requires_grad, layout.extents)
        shown.of_layout = shard.of_layout
        return shown

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Moves or casts the shard, by the arguments of `Tensor.to`; its gradient goes with it.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`.
        """
        schedule_of(self._unit).require_idle("flat_param_to()")
        handle = self._unit.handle
        if handle is None or not handle.become_sharded():
            raise RuntimeError(
                f"flat_param_to() must not run inside summon_full_params, or while a state dict of "
                f"{self._unit.name} is taken or loaded"
            )
        self._shard.data = self._shard.data.to(*args, **kwargs)
        self._shard.shard_alias = None
        handle.follow_replaced()

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Frees the full parameters of the unit, or lets the modules show sharded ones only."""
        unit, handle = self._unit, self._unit.handle
        if free_unsharded_flat_param:
            schedule_of(unit).reshard(unit)
        elif handle is not None and not unit.running:
            handle.shown.show_sharded()

    def needs_unshard(self) -> bool:
        """Whether the full parameters are not there."""
        handle = self._unit.handle
        return handle is not None and handle.state is HandleState.SHARDED and self.uses_sharded_strategy

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the size of the shard, where there are shards."""
        return self.uses_sharded_strategy and tensor.size() == self._shard.size()

    def _get_padded_unsharded_flat_param(self) -> Any:
        """Returns a copy of the unsharded buffer, or nothing while that is freed."""
        return self._shard._full_param_padded

    def shard_metadata(self) -> Any:
        """What of the original parameters this rank holds."""
        shard = self._shard
        infos = shard._shard_param_infos
        ranges = tuple((info[3], info[4]) for info in infos)
        columns = (shard._fqns, shard._shapes, shard._strides, shard._contiguities, shard._numels, ranges)
        held = [row for row, info in zip(zip(*columns), infos) if info[0]]
        return torch_flat_param.FlatParamShardMetadata(*(list(zip(*held)) or [()] * len(columns)))

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yields (name, module's name) of all parameters, tied ones under each."""
        yield from ((info[0], info[2]) for info in self._shard._param_infos)
        yield from self.shared_param_module_names()

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yields (name, module's name) of tied parameters, save for the first of each."""
        yield from ((info[0], info[2]) for info in self._shard._shared_param_infos)

    sharded_grad = property(attrgetter("_shard.grad"), doc="The gradient of the shard.")
    process_group = property(attrgetter("_wrapper.process_group"), doc="The ranks over which is sharded.")
    rank = property(attrgetter("_wrapper.rank"), doc="This process's rank in `process_group`.")
    world_size = property(attrgetter("_wrapper.world_size"), doc="How many ranks `process_group` has.")
    device = property(attrgetter("_wrapper.compute_device"), doc="Where the unit computes.")
    _device_handle = property(attrgetter("_wrapper._device_handle"))
    _fully_sharded_module = property(attrgetter("_wrapper.module"))
    _use_orig_params = property(attrgetter("_wrapper._use_orig_params"))
    _offload_params = property(attrgetter("_wrapper.cpu_offload.offload_params"))
    _keep_low_precision_grads = property(attrgetter("_wrapper.mixed_precision.keep_low_precision_grads"))
    _fwd_bwd_param_dtype = property(attrgetter("_segment.dtypes.param"))
    _reduce_dtype = property(attrgetter("_segment.dtypes.reduce"))

    _fqns_in_shard = property(
        lambda self: [x for x, info in zip(self._shard._fqns, self._shard._shard_param_infos) if info[0]]
    )

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether each rank has a part of its own."""
        return self._wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD

    _sharding_strategy = property(
        lambda self: torch_flat_param.HandleShardingStrategy[self._wrapper.sharding_strategy.name]
    )

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype of the shard, to which clients write after an upcast."""
        return self._shard.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        handle = self._unit.handle
        if handle is not None and handle.state is HandleState.SHARDED:
            handle.follow_replaced()

    _uses_param_mixed_precision = property(lambda self: self._fwd_bwd_param_dtype != self._orig_param_dtype)

    _uses_reduce_mixed_precision = property(lambda self: self._reduce_dtype != self._orig_param_dtype)

    _training_state = property(
        lambda self: torch_common_utils.HandleTrainingState[_training_state_of(self._unit)[1]]
    )


def _training_state_of(unit: Unit) -> tuple[str, str]:
    """Returns the names of what a unit is used for now, as a wrapper's and as a handle's."""
    if is_summoned(unit):
        return "SUMMON_FULL_PARAMS", "SUMMON_FULL_PARAMS"
    if unit.running:
        return "FORWARD_BACKWARD", "FORWARD"
    return ("FORWARD_BACKWARD", "BACKWARD_PRE") if _in_backward(unit) else ("IDLE", "IDLE")


def _in_backward(unit: Unit) -> bool:
    return graph_task() != -1 and unit.reached


def _computes(unit: Unit) -> bool:
    """Whether a unit's forward or backward runs, with its full parameters."""
    if unit.handle is None or unit.handle.state is not HandleState.UNSHARDED:
        return False
    return unit.running > 0 or _in_backward(unit)


# wrappers


def _dissolve(schedule: Schedule) -> None:
    """Lets the units of an idle schedule join another, or a new one, when they are used next."""
    schedule.require_idle("a change of _is_root")
    for unit in schedule.units:
        schedule.reshard(unit)
        unit.leave()


class _Order:
    """What is asked of a wrapper's `_exec_order_data`."""

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
    """The private attributes of torch's wrappers that programs read, or write to."""

    _comm_hook = _to_register("_comm_hook")
    _comm_hook_state = _to_register("_comm_hook_state")
    _use_orig_params = property(attrgetter("_settings.use_orig_params"))
    _state_dict_type = property(attrgetter("_state_dict_settings.state_dict_type"))
    _state_dict_config = property(attrgetter("_state_dict_settings.state_dict_config"))
    _optim_state_dict_config = property(attrgetter("_state_dict_settings.optim_state_dict_config"))
    _exec_order_data = property(_Order)

    @cached_property
    def _flat_handles(self) -> list[FlatHandle]:
        handle = self._unit.handle
        return [FlatHandle(self, number) for number in range(len(handle.segments) if handle else 0)]

    params = property(
        lambda self: [handle.flat_param for handle in self._flat_handles],
        doc="The unit's `FlatParameter`s; while it computes, copies of what it computes with.",
    )
    _has_params = property(lambda self: self._unit.handle is not None)

    @property
    def _handle(self) -> FlatHandle | None:
        """Of several, that of the parameter that a client may upcast; see `ParamHandle.flat_param`."""
        handle: Any = self._unit.handle
        return next((each for each in self._flat_handles if each._shard is handle.flat_param), None)

    _flat_param = property(lambda self: None if self._handle is None else self._handle.flat_param)

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost instance; None before its first use."""
        schedule = self._unit.schedule
        return None if schedule is None else schedule.root is self._unit

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Lets an instance that was used alone, as a root, find its root anew at the next forward.

        Raises:
            RuntimeError: If it is to be the root and another one encloses it; inside a forward or backward.
        """
        if is_root:
            if schedule_of(self._unit).root is not self._unit:
                raise RuntimeError(
                    f"{self._unit.name} is no root, since another instance encloses it: set _is_root there"
                )
        elif self._is_root:
            _dissolve(schedule_of(self._unit))

    _all_fsdp_states = property(lambda self: self.fsdp_modules(self))
    _all_handles = property(
        lambda self: [handle for state in self._all_fsdp_states for handle in state._flat_handles]
    )
    _fully_sharded_module_to_handle = property(
        lambda self: {} if self._handle is None else {self.module: self._handle}
    )
    _device_handle = property(
        lambda self: torch_common_utils._FSDPDeviceHandle.from_device(self.compute_device)
    )
    training_state = property(
        lambda self: torch_common_utils.TrainingState[_training_state_of(self._unit)[0]],
        doc="What the unit is used for now, as torch's enum.",
    )
