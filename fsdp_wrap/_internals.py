"""What torch's flat parameters, their handles and wrappers carry under private names, and programs read.

All of it is computed when it is asked for, from what our runtime has. It differs from torch's in two ways. A
flat parameter holds its shard at all times: what is read of a unit while it computes are copies of the values
that it computes with. And a unit may have several flat parameters, each with a handle of its own. What our
runtime has no counterpart of is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fsdp_wrap._handle import HandleState
from fsdp_wrap._modules import WRAPPED_ATTR, Place, clean_fqn
from fsdp_wrap._schedule import Schedule, schedule_of
from fsdp_wrap._segment import Segment
from fsdp_wrap._settings import ShowsSettings
from fsdp_wrap._torch_private import graph_task, torch_common_utils, torch_flat_param
from fsdp_wrap._unit import Unit, units_in
from fsdp_wrap.api import ShardingStrategy, StateDictSettings, StateDictType
from fsdp_wrap.flat_param import FlatLayout, FlatParameter, HiddenFlatParameter
from fsdp_wrap.full_params import is_summoned

__all__ = ["FlatHandle", "ShowsInternals", "refuse_internal"]

_GRADIENT = "its gradient is `.grad`, on the device of the shard"
_SUMMON = "use summon_full_params"
_BY_ITSELF = "the runtime orders its communication by itself"
_ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "_cpu_grad": _GRADIENT,
        "_saved_grad_shard": _GRADIENT,
        "_post_backward_hook_state": "use register_post_accumulate_grad_hook on the sharded parameter",
        "_full_prec_full_param_padded": _SUMMON,
        "_param_extensions": "there are no extensions",
        "pre_unshard": _SUMMON,
        "unshard": _SUMMON,
        "post_unshard": _SUMMON,
        "post_reshard": "reshard() does all of it",
        "unshard_grad": "use summon_full_params(with_grads=True)",
        "reshard_grad": "use summon_full_params(with_grads=True)",
        "to_cpu": "use summon_full_params(offload_to_cpu=True)",
        "unflatten_as_params": _SUMMON,
        "_use_sharded_views": "use reshard(True)",
        "_use_unsharded_views": _SUMMON,
        "_use_unsharded_flat_param": _SUMMON,
        "_alloc_padded_unsharded_flat_param": _SUMMON,
        "_free_unsharded_flat_param": "use reshard(True)",
        "prepare_gradient_for_backward": _GRADIENT,
        "prepare_gradient_for_optim": _GRADIENT,
        "_unshard_stream": _BY_ITSELF,
        "_pre_unshard_stream": _BY_ITSELF,
        "_post_backward_stream": _BY_ITSELF,
        "_all_reduce_stream": _BY_ITSELF,
        "_default_stream": _BY_ITSELF,
        "_streams": _BY_ITSELF,
        "_free_event_queue": _BY_ITSELF,
        "_unshard_event": _BY_ITSELF,
        "handles_pre_forward_order": "see fsdp_wrap._events for the order in which units run",
        "handles_post_forward_order": "see fsdp_wrap._events for the order in which units run",
    }
)
"""What torch's objects have and ours cannot, with what to do instead."""


def refuse_internal(kind: str, name: str) -> None:
    """Refuses what torch's objects have and ours cannot; what neither has is left to the caller.

    Raises:
        AttributeError: Saying what to use instead.
    """
    if name in _ABSENT:
        raise AttributeError(f"fsdp_wrap has no '{name}' of a {kind}, as torch has: {_ABSENT[name]}")


# flat parameters


def _layout_of(param: FlatParameter) -> FlatLayout:
    layout = None if param.of_layout is None else param.of_layout()
    if layout is None:
        raise AttributeError(
            f"this FlatParameter, of '{param._fqns[0]}' and others, is a copy, or its model is gone: read "
            "this from the parameter of a wrapped module"
        )
    return layout


def _local_shard(param: FlatParameter) -> torch.Tensor:
    """The shard: one object as long as it lies at one place, as programs compare identities."""
    own = param if param.of_layout is None else _layout_of(param).flat_param
    if own.shard_alias is None or _lies_elsewhere(own.shard_alias, own):
        own.shard_alias = own.data
    return own.shard_alias


def _set_local_shard(param: FlatParameter, shard: torch.Tensor) -> None:
    """Takes over another shard, as assigning `.data` does."""
    own = param if param.of_layout is None else _layout_of(param).flat_param
    if shard.shape != own.shape:
        raise ValueError(
            f"the shard of the FlatParameter of '{own._fqns[0]}' and others has shape {tuple(own.shape)}; it "
            f"cannot be replaced by a tensor of shape {tuple(shard.shape)}"
        )
    if _lies_elsewhere(shard, own):
        own.data = shard
    own.shard_alias = own.data


def _lies_elsewhere(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() != other.data_ptr() or one.dtype != other.dtype or one.device != other.device


def _mp_shard(param: FlatParameter) -> torch.Tensor:
    """Nothing, in the param dtype: the cast writes into the buffer that travels."""
    layout = _layout_of(param)
    dtype = _computed_in(layout)
    if dtype == layout.dtype:
        raise AttributeError("a FlatParameter has an '_mp_shard' in mixed precision of parameters only")
    return torch.empty(0, dtype=dtype, device=layout.leaves[0].device)


def _computed_in(layout: FlatLayout) -> torch.dtype:
    return layout.leaves[0].dtype


def _full_param_padded(param: FlatParameter) -> torch.Tensor:
    """A copy of the unsharded buffer; nothing while that is freed."""
    return _copy_of_full(_sharded_layout_of(param, "_full_param_padded"))


def _padded_unsharded_size(param: FlatParameter) -> torch.Size:
    return torch.Size([_sharded_layout_of(param, "_padded_unsharded_size").full_numel])


def _sharded_layout_of(param: FlatParameter, name: str) -> FlatLayout:
    layout = _layout_of(param)
    if not layout.sharded:
        raise AttributeError(f"a FlatParameter has a '{name}' where it is sharded only")
    return layout


@torch.no_grad()
def _copy_of_full(layout: FlatLayout) -> torch.Tensor:
    largest = max(layout.leaves, key=torch.Tensor.numel)
    if not largest.untyped_storage().size():
        return largest.new_empty(0)
    full = largest.new_zeros(layout.full_numel)
    for view, leaf in zip(layout.views(full), layout.leaves):
        view.copy_(leaf)
    return full


def _shard_param_infos(param: FlatParameter) -> tuple[Any, ...]:
    layout = _layout_of(param)
    make, infos = torch_flat_param._ShardParamInfo, []
    for extent in layout.extents:
        start, stop = extent.within(layout.first, layout.shard_numel)
        first = layout.first + start - extent.start
        found = (start, stop - start, first, first + stop - start - 1) if stop > start else (None,) * 4
        infos.append(make(stop > start, *found))
    return tuple(infos)


def _param_infos(param: FlatParameter) -> tuple[Any, ...]:
    layout = _layout_of(param)
    pairs = zip(layout.places, layout.fqns)
    return tuple(
        torch_flat_param.ParamInfo(name, module, fqn.removesuffix(name).removesuffix("."))
        for (module, name), fqn in ((next(iter(places)), fqn) for places, fqn in pairs)
    )


def _other_places(layout: FlatLayout) -> Iterator[tuple[int, Place]]:
    """Yields the places of tied parameters beside the first, with their parameter's number."""
    for index, places in enumerate(layout.places):
        for place in list(places)[1:]:
            yield index, place


def _shared_param_infos(param: FlatParameter) -> tuple[Any, ...]:
    layout, firsts = _layout_of(param), _param_infos(param)
    names = {module: clean_fqn(name) for name, module in layout.module.named_modules()}
    return tuple(
        torch_flat_param.SharedParamInfo(
            name, module, names.get(module, ""), firsts[index][0], firsts[index][1], firsts[index][2]
        )
        for index, (module, name) in _other_places(layout)
    )


def _orig_params(param: FlatParameter) -> list[nn.Parameter] | None:
    """The slices that the optimizer sees; None where it sees the flat parameter."""
    layout = _layout_of(param)
    return None if layout.sources[0] is layout.flat_param else list(layout.sources)


def _shared_params(param: FlatParameter) -> list[nn.Parameter] | None:
    params = _orig_params(param)
    return None if params is None else [params[index] for index, _ in _other_places(_layout_of(param))]


def _is_grad_none_mask(param: FlatParameter) -> list[bool] | None:
    params = _orig_params(param)
    return None if params is None else [each.grad is None for each in params]


def _stretches(param: FlatParameter) -> list[tuple[int, bool]]:
    """The element counts of parameters and of the gaps between them, in order, with which are gaps."""
    found, end = [], 0
    for extent in _layout_of(param).extents:
        if extent.start > end:
            found.append((extent.start - end, True))
        found.append((extent.stop - extent.start, False))
        end = extent.stop
    return found


def _shard_numel_padded(param: FlatParameter) -> int:
    layout = _layout_of(param)
    return min(layout.shard_numel, max(0, layout.first + layout.shard_numel - layout.extents[-1].stop))


def _strides(param: FlatParameter) -> tuple[tuple[int, ...], ...]:
    return tuple(torch.empty(shape, device="meta").stride() for shape in param._shapes)


def _modules_of(param: FlatParameter) -> set[nn.Module]:
    return {module for places in _layout_of(param).places for module, _ in places}


_OF_FLAT_PARAMETERS: Mapping[str, property] = {
    "_local_shard": property(_local_shard, _set_local_shard),
    "_mp_shard": property(_mp_shard),
    "_full_param_padded": property(_full_param_padded),
    "_shard_param_infos": property(_shard_param_infos),
    "_param_infos": property(_param_infos),
    "_shared_param_infos": property(_shared_param_infos),
    "_params": property(_orig_params),
    "_shared_params": property(_shared_params),
    "_is_grad_none_mask": property(_is_grad_none_mask),
    "_num_params": property(lambda param: len(param._fqns)),
    "_numels_with_padding": property(lambda param: tuple(numel for numel, _ in _stretches(param))),
    "_is_padding_mask": property(lambda param: [padding for _, padding in _stretches(param)]),
    "_strides": property(_strides),
    "_contiguities": property(lambda param: (True,) * len(param._fqns)),
    "_modules": property(_modules_of),
    "_sharded_size": property(lambda param: _local_shard(param).size()),
    "_shard_numel_padded": property(_shard_numel_padded),
    "_unpadded_unsharded_size": property(lambda param: torch.Size([_layout_of(param).extents[-1].stop])),
    "_padded_unsharded_size": property(_padded_unsharded_size),
}



def _absent(name: str) -> property:
    return property(lambda param: refuse_internal("FlatParameter", name))


for _name in ("_cpu_grad", "_saved_grad_shard", "_post_backward_hook_state", "_full_prec_full_param_padded"):
    setattr(FlatParameter, _name, _absent(_name))
for _name, _property in _OF_FLAT_PARAMETERS.items():
    setattr(FlatParameter, _name, _property)


# handles


class FlatHandle:
    """One flat parameter of a wrapper, as `torch.distributed.fsdp._flat_param.FlatParamHandle`.

    Args:
        wrapper: The wrapper.
        number: Of the flat parameter among the wrapper's.
    """

    def __init__(self, wrapper: ShowsInternals, number: int) -> None:
        self._wrapper, self._number = wrapper, number

    def __getattr__(self, name: str) -> Any:
        refuse_internal("handle", name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {', '.join(self._layout.fqns)}"

    @property
    def _unit(self) -> Unit:
        return self._wrapper._unit

    @property
    def _segment(self) -> Segment:
        assert self._unit.handle is not None
        return self._unit.handle.segments[self._number]

    @property
    def _layout(self) -> FlatLayout:
        return _layout_of(self._shard)

    @property
    def _shard(self) -> FlatParameter:
        param = self._segment.layout.flat_param
        assert isinstance(param, FlatParameter)
        return param

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
        schedule = schedule_of(self._unit)
        schedule.require_idle("flat_param_to()")
        schedule.end_failed_backward()
        handle = self._unit.handle
        if handle is None or not handle.settle():
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

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Returns a copy of the unsharded buffer, or nothing while that is freed."""
        return _full_param_padded(self._shard)

    def shard_metadata(self) -> Any:
        """What of the original parameters this rank holds."""
        shard = self._shard
        infos = _shard_param_infos(shard)
        ranges = tuple((info[3], info[4]) for info in infos)
        columns = (shard._fqns, shard._shapes, _strides(shard), (True,) * len(infos), shard._numels, ranges)
        held = [row for row, info in zip(zip(*columns), infos) if info[0]]
        return torch_flat_param.FlatParamShardMetadata(*(list(zip(*held)) or [()] * len(columns)))

    def param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yields (name, module's name) of all parameters, tied ones under each."""
        for info in (*_param_infos(self._shard), *_shared_param_infos(self._shard)):
            yield info[0], info[2]

    def shared_param_module_names(self) -> Iterator[tuple[str, str]]:
        """Yields (name, module's name) of tied parameters, save for the first of each."""
        for info in _shared_param_infos(self._shard):
            yield info[0], info[2]

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """The gradient of the shard."""
        return self._shard.grad

    @property
    def _fqns_in_shard(self) -> list[str]:
        return [fqn for fqn, info in zip(self._shard._fqns, _shard_param_infos(self._shard)) if info[0]]

    @property
    def _fully_sharded_module(self) -> nn.Module:
        module = self._wrapper._modules[WRAPPED_ATTR]
        assert module is not None
        return module

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """The ranks over which is sharded."""
        return self._wrapper.process_group

    @property
    def rank(self) -> int:
        """This process's rank in `process_group`."""
        return self._wrapper.rank

    @property
    def world_size(self) -> int:
        """How many ranks `process_group` has."""
        return self._wrapper.world_size

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        return self._wrapper.compute_device

    @property
    def _device_handle(self) -> Any:
        return self._wrapper._device_handle

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether each rank has a part of its own."""
        return self._wrapper.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def _sharding_strategy(self) -> Any:
        return torch_flat_param.HandleShardingStrategy[self._wrapper.sharding_strategy.name]

    @property
    def _offload_params(self) -> bool:
        return self._wrapper.cpu_offload.offload_params

    @property
    def _use_orig_params(self) -> bool:
        return self._wrapper._use_orig_params

    @property
    def _keep_low_precision_grads(self) -> bool:
        return self._wrapper.mixed_precision.keep_low_precision_grads

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype of the shard, to which clients write after an upcast."""
        return self._shard.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        handle = self._unit.handle
        if handle is not None and handle.state is HandleState.SHARDED:
            handle.follow_replaced()

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._segment.dtypes.param

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._segment.dtypes.reduce

    @property
    def _uses_param_mixed_precision(self) -> bool:
        return self._fwd_bwd_param_dtype != self._orig_param_dtype

    @property
    def _uses_reduce_mixed_precision(self) -> bool:
        return self._reduce_dtype != self._orig_param_dtype

    @property
    def _training_state(self) -> Any:
        states = torch_common_utils.HandleTrainingState
        if is_summoned(self._unit):
            return states.SUMMON_FULL_PARAMS
        if self._unit.running:
            return states.FORWARD
        return states.BACKWARD_PRE if _in_backward(self._unit) else states.IDLE


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
    schedule.end_failed_backward()
    for unit in units_in(schedule.root.module).values():
        if unit.schedule is schedule:
            schedule.reshard(unit)
            unit.leave()


class _Order:
    """What is asked of a wrapper's `_exec_order_data`."""

    def __init__(self, wrapper: ShowsInternals) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        refuse_internal("wrapper's _exec_order_data", name)
        raise AttributeError(f"a wrapper's _exec_order_data has no attribute '{name}'")

    @property
    def all_handles(self) -> list[FlatHandle]:
        """Those of all flat parameters, in the order of the modules."""
        return self._wrapper._all_handles


class ShowsInternals(ShowsSettings):
    """The private attributes of torch's wrappers that programs read, or write to."""

    _flat_handles: Sequence[FlatHandle]
    _state_dict_settings: StateDictSettings

    def _make_flat_handles(self) -> None:
        handle = self._unit.handle
        self._flat_handles = [FlatHandle(self, each) for each in range(len(handle.segments) if handle else 0)]

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters of this unit: its `FlatParameter`s; none where it owns no parameters.

        While it computes, copies of what it computes with stand for them.
        """
        return [handle.flat_param for handle in self._flat_handles]

    @property
    def _has_params(self) -> bool:
        return self._unit.handle is not None

    @property
    def _handle(self) -> FlatHandle | None:
        """Of several, that of the parameter that a client may upcast; see `ParamHandle.flat_param`."""
        handle = self._unit.handle
        if handle is None:
            return None
        return next(each for each in self._flat_handles if each._shard is handle.flat_param)

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return None if self._handle is None else self._handle.flat_param

    @property
    def _is_root(self) -> bool | None:
        """Whether this is the outermost instance; None before its first use."""
        schedule = self._unit.schedule
        return schedule.root is self._unit if isinstance(schedule, Schedule) else None

    @_is_root.setter
    def _is_root(self, is_root: bool | None) -> None:
        """Lets an instance that was used alone, as a root, find its root anew at the next forward.

        Raises:
            RuntimeError: If it is to be the root and another one encloses it; inside a forward or backward.
        """
        if is_root:
            if schedule_of(self._unit).root is not self._unit:
                raise RuntimeError(f"{self._unit.name} is no root: another instance encloses it")
        elif self._is_root:
            _dissolve(schedule_of(self._unit))

    @property
    def _all_fsdp_states(self) -> list[ShowsInternals]:
        return [module for module in self.modules() if isinstance(module, ShowsInternals)]

    @property
    def _all_handles(self) -> list[FlatHandle]:
        return [handle for state in self._all_fsdp_states for handle in state._flat_handles]

    @property
    def _fully_sharded_module_to_handle(self) -> dict[nn.Module, FlatHandle]:
        handle = self._handle
        return {} if handle is None else {handle._fully_sharded_module: handle}

    @property
    def _exec_order_data(self) -> _Order:
        return _Order(self)

    @property
    def _device_handle(self) -> Any:
        return torch_common_utils._FSDPDeviceHandle.from_device(self.compute_device)

    @property
    def _use_orig_params(self) -> bool:
        return self._settings.use_orig_params

    @property
    def _state_dict_type(self) -> StateDictType:
        return self._state_dict_settings.state_dict_type

    @property
    def _state_dict_config(self) -> Any:
        return self._state_dict_settings.state_dict_config

    @property
    def _optim_state_dict_config(self) -> Any:
        return self._state_dict_settings.optim_state_dict_config

    @property
    def training_state(self) -> Any:
        """What the unit is used for now, as torch's enum."""
        states = torch_common_utils.TrainingState
        if is_summoned(self._unit):
            return states.SUMMON_FULL_PARAMS
        runs = self._unit.running or _in_backward(self._unit)
        return states.FORWARD_BACKWARD if runs else states.IDLE
