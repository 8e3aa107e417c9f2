"""Methods other than `forward` that compute with full parameters, such as `generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method of a wrapped module run as its forward does: with full parameters and gradients.

    It may be called on the wrapper or on the wrapped module. Units inside are unsharded when their own
    forward, or registered method, runs. As with forward, every rank must make the call, and inner units
    must run equally often on all of them.

    Where gradients are enabled but no result needs one, the unit's full parameters stay until its next
    forward, since a graph may have been kept elsewhere; under `torch.no_grad()` they are freed at once.

    Args:
        module: A wrapper; of any other module nothing is registered, so that the same code serves models
            which are not wrapped.
        method_name: The method, which returns its result rather than yield it.

    Raises:
        ValueError: If the wrapped module has no such method, the wrapper has one of the same name, or it is
            a generator or coroutine function, whose body would run after the parameters are sharded again.
    """
    if not isinstance(module, FullyShardedDataParallel):
        return
    wrapped = module.module
    method = getattr(wrapped, method_name, None)
    if isinstance(method, _ForwardMethod):
        return
    owner = type(wrapped).__name__
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(f"{owner} has no method '{method_name}'")
    if hasattr(FullyShardedDataParallel, method_name):
        raise ValueError(
            f"'{method_name}' is a method of FullyShardedDataParallel itself, which hides that of {owner}"
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ValueError(
            f"{owner}.{method_name} is a generator or coroutine function, whose body would run after the "
            "parameters are sharded again; register a method that returns its result"
        )
    setattr(wrapped, method_name, _ForwardMethod(module, method))


class _ForwardMethod:
    """Stands for a method of a wrapped module; an object, so that it is copied along with the module."""

    def __init__(self, wrapper: FullyShardedDataParallel, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._wrapper = wrapper
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper._run_as_forward(self._method, args, kwargs)
