"""Walks over the modules of a tree, and names in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")

WRAPPED_ATTR = "_fsdp_wrapped_module"
"""Attribute under which a wrapper holds the module that it wraps (torch's name)."""

_PREFIXES = (WRAPPED_ATTR + ".", "_checkpoint_wrapped_module.")


def clean_fqn(name: str) -> str:
    """Removes the prefixes that wrappers add to a parameter's or module's name."""
    name += "."  # it may end with one of them
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name[:-1]


Place = tuple[nn.Module, str]  # and the name under which it shows a parameter


def joined(prefix: str, name: str) -> str:
    """Returns the name of something within the module of a prefix."""
    return f"{prefix}.{name}" if prefix else name


def walk(
    module: nn.Module, *, all_names: bool = False, into: Callable[[nn.Module], bool] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `module.named_modules()` does, in its order, at a cost that does not grow with the depth.

    `all_names` yields a module once for every name that it has. `into` tells whether to yield a module below,
    and those below that; None for all. Raises a TypeError for anything but a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, not a {type(module).__name__}")
    stack, seen = [("", module)], set[nn.Module]()
    while stack:
        name, current = stack.pop()
        if not all_names:
            if current in seen:
                continue
            seen.add(current)
        yield name, current
        for own, child in reversed(current._modules.items()):
            if child is not None and (into is None or into(child)):
                stack.append((joined(name, own), child))


def named(
    module: nn.Module,
    entries: Callable[[nn.Module], Iterable[tuple[str, T]]],
    *,
    all_names: bool = False,
    into: Callable[[nn.Module], bool] | None = None,
) -> Iterator[tuple[str, Place, T]]:
    """Yields (clean name, place, value) for the `entries` of a module and of those below it.

    `entries` returns (name, value) of one module, as `params` does; the other arguments are those of `walk`.
    """
    for prefix, current in walk(module, all_names=all_names, into=into):
        for name, value in entries(current):
            yield clean_fqn(joined(prefix, name)), (current, name), value


def params(module: nn.Module) -> Iterable[tuple[str, nn.Parameter | None]]:
    """Returns the parameters of one module, and the names that have none."""
    return module._parameters.items()


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of one module that are part of its state dict."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the `params` of one module, and then its `persistent` buffers."""
    yield from params(module)
    yield from persistent(module)


def children_first(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Reorders modules from `own_modules` to children before parents."""
    waiting: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        while waiting and waiting[-1][0] and not name.startswith(f"{waiting[-1][0]}."):
            yield waiting.pop()
        waiting.append((name, module))
    yield from reversed(waiting)
