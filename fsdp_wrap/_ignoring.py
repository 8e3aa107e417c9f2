"""What users name as not to be sharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_wrap._composition import find_replicated
from fsdp_wrap._errors import WrongKindError
from fsdp_wrap._modules import UNIT_ATTR, Ignored

__all__ = ["resolve_ignored"]


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Reads the two arguments by which users name what not to shard.

    Warns if `module` itself is to be ignored, which leaves its unit nothing to shard.

    Raises:
        TypeError: If they are no collections.
        WrongKindError: If they hold anything else than modules or parameters.
        ValueError: If both are given, or hold a wrapped module.
    """
    if isinstance(ignored_states, Ignored):  # of the unit above, which has resolved it
        return ignored_states
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ignored_modules and ignored_states exclude each other; pass both kinds as ignored_states"
        )
    argument = "ignored_states" if ignored_modules is None else "ignored_modules"
    given = list(_iterate(argument, ignored_states if ignored_modules is None else ignored_modules))
    allowed = (nn.Module,) if argument == "ignored_modules" else (nn.Module, nn.Parameter)
    for item in given:
        if not isinstance(item, allowed):
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise WrongKindError(f"{argument} must hold {kinds} objects only, found {type(item).__name__}")
        _refuse_ignored_unit(argument, item)
    modules = {child for item in given if isinstance(item, nn.Module) for child in item.modules()}
    if module in modules:
        warnings.warn(
            f"{argument} holds the {type(module).__name__} that is being wrapped: all its parameters stay as "
            "they are, whole on every rank, and their gradients are not reduced",
            stacklevel=3,
        )
    params = {item for item in given if isinstance(item, nn.Parameter)}
    modules |= find_replicated([module])
    params.update(param for child in modules for param in child.parameters(recurse=False))
    return Ignored(frozenset(modules), frozenset(params))


def _refuse_ignored_unit(argument: str, item: nn.Module | nn.Parameter) -> None:
    if UNIT_ATTR in item.__dict__:
        raise ValueError(
            f"{argument} holds a {type(item).__name__} that is sharded already, and so needs not be ignored: "
            "leave it out, the modules above do not touch what it has"
        )


def _iterate(argument: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be an iterable, not {type(value).__name__}")
    return value
