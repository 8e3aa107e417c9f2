"""Private attributes of torch's wrapper that accelerate reads, on ours.

accelerate casts flat parameters of low precision to float32 before the first forward. Torch's other private
attributes are refused, with what to use instead.

Importing this file adds the attributes to the wrapper, which knows nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_wrap._params import FlatParameter, HandleState
from fsdp_wrap._runtime import Unit
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FlatHandle"]

_INSTEAD = {
    "use the wrapper's parameters()": "params _all_handles _flat_handles _exec_order_data _handles",
    "call check_is_root()": "_is_root",
    "call FullyShardedDataParallel.get_state_dict_type(module)": "_state_dict_type",
    "read the wrapper's compute_device, sharding_strategy, cpu_offload and mixed_precision": (
        "_device_handle _use_orig_params _offload_params uses_sharded_strategy training_state needs_unshard"
    ),
    "the flat parameter is the shard, and its gradient is `.grad`": (
        "_local_shard sharded_grad prepare_gradient_for_backward prepare_gradient_for_optim"
    ),
    "there are no extensions": "_param_extensions",
    "use register_comm_hook(state, hook) of the root": "_comm_hook _comm_hook_state",
    "parameters are resharded after each use": (
        "reshard post_reshard _use_sharded_views _free_unsharded_flat_param"
    ),
    "use summon_full_params": (
        "pre_unshard unshard post_unshard unflatten_as_params _full_param_padded _mp_shard "
        "_shard_param_infos _param_infos _params _get_padded_unsharded_flat_param "
        "_use_unsharded_views _use_unsharded_flat_param _alloc_padded_unsharded_flat_param"
    ),
    "use summon_full_params(with_grads=True)": "unshard_grad reshard_grad",
    "use summon_full_params(offload_to_cpu=True), or model.to(device)": "to_cpu flat_param_to",
    "the runtime orders its communication by itself": (
        "_unshard_stream _pre_unshard_stream _post_backward_stream _all_reduce_stream _default_stream "
        "_streams _free_event_queue _unshard_event"
    ),
}
"""Cure -> names of attributes that torch's objects have, and ours do not."""


def _refuse(kind: str, name: str) -> None:
    """Raises AttributeError with a cure for a name of torch's; returns for any other name."""
    for instead, names in _INSTEAD.items():
        if name in names.split():
            raise AttributeError(f"fsdp_wrap has no '{name}' of a {kind}, as torch has: {instead}")


class FlatHandle:
    """One flat parameter of a wrapper, as `torch.distributed.fsdp._flat_param.FlatParamHandle`."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Any = unit

    @property
    def flat_param(self) -> FlatParameter:
        """The shard, of several one that trains in the lowest precision; the unit computes with others."""
        shard: FlatParameter = self._unit.handle.flat_param
        return shard

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """Dtype of the shard; accelerate assigns it after it has cast the shard."""
        return self.flat_param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        if self._unit.handle.state is HandleState.SHARDED:
            self._unit.handle.follow_replaced()

    def __getattr__(self, name: str) -> Any:
        return _lacking(self, name)


def _lacking(self: FlatHandle | FlatParameter, name: str) -> Any:
    """Refuses an attribute; a `__getattr__`."""
    kind = type(self).__name__
    _refuse(kind, name)
    raise AttributeError(f"'{kind}' object has no attribute '{name}'", name=name, obj=self)


_without_internals = FullyShardedDataParallel.__getattr__


def _of_wrapper(self: FullyShardedDataParallel, name: str) -> Any:
    try:
        return _without_internals(self, name)
    except AttributeError:
        _refuse("wrapper", name)
        raise


def _to_register(name: str) -> Any:
    def refuse(self: FullyShardedDataParallel, value: Any) -> None:
        raise RuntimeError(
            f"'{name}' of {self._unit.name} was set, which would have no effect: use "
            "register_comm_hook(state, hook) of the root"
        )

    return property(lambda _: _refuse("wrapper", name), refuse)


def _handle_of(wrapper: FullyShardedDataParallel) -> FlatHandle | None:
    return FlatHandle(wrapper._unit) if wrapper._unit.layouts else None


def _flat_param_of(wrapper: FullyShardedDataParallel) -> FlatParameter | None:
    handle = _handle_of(wrapper)
    return None if handle is None else handle.flat_param


for _owner, _name, _attribute in (
    (FlatParameter, "__getattr__", _lacking),
    (FullyShardedDataParallel, "__getattr__", _of_wrapper),
    (FullyShardedDataParallel, "_handle", property(_handle_of)),
    (FullyShardedDataParallel, "_flat_param", property(_flat_param_of)),
    (FullyShardedDataParallel, "_has_params", property(lambda wrapper: bool(wrapper._unit.layouts))),
    (FullyShardedDataParallel, "_comm_hook", _to_register("_comm_hook")),
    (FullyShardedDataParallel, "_comm_hook_state", _to_register("_comm_hook_state")),
):
    setattr(_owner, _name, _attribute)
