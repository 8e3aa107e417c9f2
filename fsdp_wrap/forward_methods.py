"""Methods that run with full parameters as `forward` does, such as `generate`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_wrap._core import UNIT_ATTR

__all__ = ["register_forward_method", "register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Calls `module.register_forward_method(method_name)` if `module` is wrapped or sharded.

    Any other module is left alone, so that the same code works for plain models.

    Args:
        module: Any module.
        method_name: Name of the method. It must return its result, and not be a generator.

    Raises:
        ValueError: If there is no such method, or it cannot run as a forward.
    """
    if UNIT_ATTR in module.__dict__:
        module.register_forward_method(method_name)  # type: ignore[operator]


def register_forward_method(
    wrapper: nn.Module, wrapped: nn.Module, method_name: str, run_as_forward: Callable[..., Any]
) -> None:
    """Makes a method of a wrapped module run as its forward does: with full parameters and gradients.

    Users may call the method on the wrapper or on the wrapped module. Units inside are unsharded when their
    own forward, or registered method, runs. Every rank must make the call, and inner units must run
    equally often on all ranks, as with forward.

    If gradients are enabled but no result needs one, the unit's full parameters stay until its next forward,
    since the method may have kept a graph elsewhere. Under `torch.no_grad()` they are freed at once.

    Args:
        wrapper: The wrapper.
        wrapped: The wrapped module.
        method_name: Name of the method. It must return its result, and not be a generator.
        run_as_forward: Method of the wrapper that runs `(call, *args, **kwargs)` as its forward.

    Raises:
        ValueError: If the wrapped module has no such method, or the wrapper has one of the same name. Also if
            the method is a generator or coroutine function, since its body would run after the parameters are
            sharded again.
    """
    method = getattr(wrapped, method_name, None)
    if isinstance(method, _ForwardMethod):
        return
    owner = type(wrapped).__name__
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(f"{owner} has no method '{method_name}'")
    if wrapper is not wrapped and hasattr(type(wrapper), method_name):
        raise ValueError(
            f"'{method_name}' is a method of {type(wrapper).__name__} itself, which hides that of {owner}: "
            "give that one another name"
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ValueError(
            f"{owner}.{method_name} is a generator or coroutine function, whose body would run after the "
            "parameters are sharded again; register a method that returns its result"
        )
    registered = _ForwardMethod(run_as_forward, method)
    setattr(wrapped, method_name, functools.update_wrapper(registered, method))


class _ForwardMethod(functools.partial[Any]):
    """A registered method of a wrapped module; a `partial`, so that it is copied along with the module."""
