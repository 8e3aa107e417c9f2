"""Torch's private helpers that programs call for a wrapper: for ours they answer, else torch's own do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from fsdp_wrap._forward import prepared_inputs
from fsdp_wrap._internals import FlatHandle
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._torch_private import (
    torch_common_utils,
    torch_runtime_utils,
    torch_traversal_utils,
    torch_unshard_utils,
)
from fsdp_wrap._unit import units_in
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP

__all__ = ["HELPERS"]

_theirs_of_module = torch_common_utils._get_module_fsdp_state
_theirs_lazy_init = torch_runtime_utils._lazy_init
_theirs_reshard = torch_runtime_utils._reshard
_theirs_root_pre_forward = torch_runtime_utils._root_pre_forward
_theirs_final_callback = torch_runtime_utils._post_backward_final_callback
_theirs_handles = torch_traversal_utils._get_fsdp_handles
_theirs_unshard_params = torch_unshard_utils._unshard_params
_theirs_unshard_for_summon = torch_unshard_utils._unshard_params_for_summon


@wraps(_theirs_of_module)
def _get_module_fsdp_state(module: nn.Module) -> Any:
    """A wrapper is its own state; so torch's walks over states find ours."""
    return module if isinstance(module, FSDP) else _theirs_of_module(module)


@wraps(_theirs_handles)
def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """A handle for each flat parameter, of which our units may have several."""
    handles: list[Any] = []
    for state in torch_traversal_utils._get_fsdp_states(module):
        if isinstance(state, FSDP):
            handles += state._flat_handles
        elif state._handle is not None:
            handles.append(state._handle)
    return handles


@wraps(_theirs_lazy_init)
def _lazy_init(state: Any, root_module: nn.Module) -> Any:
    """What the first forward does: the instance becomes a root, unless it has one."""
    if not isinstance(state, FSDP):
        return _theirs_lazy_init(state, root_module)
    if state._is_root is not None:
        return None
    schedule_of(state._unit)
    return state


@wraps(_theirs_reshard)
def _reshard(state: Any, handle: Any, free_unsharded_flat_param: bool) -> None:
    if not isinstance(state, FSDP):
        _theirs_reshard(state, handle, free_unsharded_flat_param)
    elif isinstance(handle, FlatHandle):
        handle.reshard(free_unsharded_flat_param)
    elif handle is not None:
        raise TypeError(f"_reshard() takes the _handle of a wrapper, not {type(handle).__name__}")


@wraps(_theirs_root_pre_forward)
def _root_pre_forward(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The inputs as the root's forward would take them; it begins by itself when it is called."""
    if not isinstance(state, FSDP):
        return _theirs_root_pre_forward(state, module, args, kwargs)
    _lazy_init(state, module)
    return prepared_inputs(state._unit, args, kwargs) if state._is_root else (args, kwargs)


@wraps(_theirs_final_callback)
def _post_backward_final_callback(state: Any, module: nn.Module) -> None:
    """Cleans up after a forward or backward that raised.

    Raises:
        RuntimeError: Inside a forward or backward, which clean up by themselves; on an instance that another
            one encloses.
    """
    if not isinstance(state, FSDP):
        _theirs_final_callback(state, module)
        return
    schedule = schedule_of(state._unit)
    if schedule.root is not state._unit:
        raise RuntimeError(
            f"_post_backward_final_callback() must be called on the root, and this is {state._unit.name}"
        )
    schedule.require_idle("_post_backward_final_callback()")
    schedule.end_failed_backward()
    for unit in units_in(state).values():
        schedule_of(unit).reshard(unit)


@wraps(_theirs_unshard_for_summon)
@contextmanager
def _unshard_params_for_summon(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Summons what one wrapper owns."""
    if isinstance(state, FSDP):
        context: Any = FSDP.summon_full_params(state, False, *args, **kwargs)
    else:
        context = _theirs_unshard_for_summon(module, state, *args, **kwargs)
    with context:
        yield


@wraps(_theirs_unshard_params)
@contextmanager
def _unshard_params(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Summons what the wrappers at and below a module own."""
    summon: Callable[..., Any] = (
        FSDP.summon_full_params if FSDP.fsdp_modules(module) else _theirs_unshard_params
    )
    with summon(module, recurse, *args, **kwargs):
        yield


HELPERS: list[tuple[Any, Any]] = [
    (_theirs_of_module, _get_module_fsdp_state),
    (_theirs_handles, _get_fsdp_handles),
    (_theirs_lazy_init, _lazy_init),
    (_theirs_reshard, _reshard),
    (_theirs_root_pre_forward, _root_pre_forward),
    (_theirs_final_callback, _post_backward_final_callback),
    (_theirs_unshard_for_summon, _unshard_params_for_summon),
    (_theirs_unshard_params, _unshard_params),
]
"""(torch's, ours)."""
