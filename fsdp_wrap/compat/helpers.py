"""Torch's private helpers that programs call with a wrapper, for ours; torch's own run for all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from types import ModuleType
from typing import Any

from torch import nn

from fsdp_wrap._by_hand import require_idle, reshard
from fsdp_wrap._checks import require_root
from fsdp_wrap._core.torch_private import (
    torch_common_utils,
    torch_runtime_utils,
    torch_traversal_utils,
    torch_unshard_utils,
)
from fsdp_wrap._runtime import step_of, units_in
from fsdp_wrap.compat.internals import FlatHandle
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP

__all__ = ["HELPERS"]

HELPERS: list[tuple[Any, Any]] = []
"""(torch's, ours)."""


def _answers(module: ModuleType, of: int = 0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function that replaces torch's of its name where argument number `of` is our wrapper.

    Passed by keyword, that argument is `state`, or else `module`.
    """

    def register(ours: Callable[..., Any]) -> Callable[..., Any]:
        theirs = getattr(module, ours.__name__)

        @wraps(theirs)
        def helper(*args: Any, **kwargs: Any) -> Any:
            asked = args[of] if len(args) > of else kwargs.get("state", kwargs.get("module"))
            return (ours if isinstance(asked, FSDP) else theirs)(*args, **kwargs)

        HELPERS.append((theirs, helper))
        return helper

    return register


@_answers(torch_common_utils)
def _get_module_fsdp_state(module: FSDP) -> FSDP:
    """Returns the wrapper as its own state, so torch's walks over states find ours."""
    return module


@_answers(torch_runtime_utils)
def _lazy_init(state: FSDP, root_module: nn.Module) -> FSDP | None:
    """Makes the instance a root unless it has one, as its first forward does."""
    if state._is_root is not None:
        return None
    step_of(state._unit)
    return state


@_answers(torch_runtime_utils)
def _reshard(state: FSDP, handle: Any, free_unsharded_flat_param: bool) -> None:
    if isinstance(handle, FlatHandle):
        handle.reshard(free_unsharded_flat_param)
    elif handle is not None:
        raise TypeError(f"_reshard() takes the _handle of a wrapper, not {type(handle).__name__}")


@_answers(torch_runtime_utils)
def _root_pre_forward(state: FSDP, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Returns the inputs as the root's forward would take them; the forward begins when it is called."""
    _lazy_init(state, module)
    if state._is_root:
        unit, step = state._unit, step_of(state._unit)
        device = None if step.depth else step.device
        _, args, kwargs = unit.casts.prepare(unit is step.root, device, args, kwargs)
    return args, kwargs


@_answers(torch_runtime_utils)
def _post_backward_final_callback(state: FSDP, module: nn.Module) -> None:
    """Cleans up after a forward or backward that raised."""
    require_root(state._unit, "_post_backward_final_callback()")
    require_idle([state._unit], "_post_backward_final_callback()")
    for unit in units_in(state).values():
        reshard(unit)


@_answers(torch_unshard_utils, of=1)
def _unshard_params_for_summon(module: nn.Module, state: FSDP, *args: Any, **kwargs: Any) -> Any:
    """Summons the parameters of one wrapper alone."""
    return FSDP.summon_full_params(state, False, *args, **kwargs)


_theirs_unshard_params = torch_unshard_utils._unshard_params


@wraps(_theirs_unshard_params)
@contextmanager
def _unshard_params(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Summons the parameters of all wrappers at and below a module."""
    ours = bool(FSDP.fsdp_modules(module))
    with (FSDP.summon_full_params if ours else _theirs_unshard_params)(module, recurse, *args, **kwargs):
        yield


@wraps(torch_traversal_utils._get_fsdp_handles)
def _get_fsdp_handles(module: nn.Module) -> list[Any]:
    """Returns a handle for each flat parameter, of which our units may have several."""
    states = torch_traversal_utils._get_fsdp_states(module)
    handles = (state._flat_handles if isinstance(state, FSDP) else [state._handle] for state in states)
    return [handle for handle in chain.from_iterable(handles) if handle is not None]


HELPERS.append((_theirs_unshard_params, _unshard_params))
HELPERS.append((torch_traversal_utils._get_fsdp_handles, _get_fsdp_handles))
