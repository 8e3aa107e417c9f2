"""Finds and replaces the tensors in the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fsdp_wrap._core.torch_private import pytree

_ATOMS = (int, float, str, bytes, bool, type(None))


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested containers, dataclasses and registered pytree nodes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, _ATOMS):
        for child in _children(value):
            yield from iter_tensors(child)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns `value` with every tensor replaced by `fn(tensor)`.

    A container in which nothing changed is returned as it is, so that the identity of user objects
    survives wherever it can.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, _ATOMS):
        return value
    plain = type(value) is tuple
    old, new = value if plain else _children(value), []
    for child in old:  # not in a comprehension, which takes a frame of its own
        new.append(fn(child) if isinstance(child, torch.Tensor) else map_tensors(fn, child))
    if all(map(operator.is_, old, new)):
        return value
    return tuple(new) if plain else _rebuild(value, new)


def _children(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, (dict, Mapping)):  # asking for the former is cheap
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:
        return list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    return []


def _rebuild(value: Any, children: list[Any]) -> Any:
    if isinstance(value, tuple):
        make: Any = getattr(type(value), "_make", type(value))  # named tuples take no iterable
        return make(children)
    if isinstance(value, list):
        return type(value)(children)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, children)
    if dataclasses.is_dataclass(value):
        duplicate = copy.copy(value)
        for field, child in zip(dataclasses.fields(value), children):
            object.__setattr__(duplicate, field.name, child)  # also for frozen dataclasses
        return duplicate
    node = pytree.SUPPORTED_NODES[type(value)]
    return node.unflatten_fn(children, node.flatten_fn(value)[1])


def _rebuild_mapping(value: Mapping[Any, Any], children: list[Any]) -> Any:
    duplicate: Any = copy.copy(value)  # keeps subclasses and their attributes, such as a default factory
    for key, child in zip(value, children):
        duplicate[key] = child
    return duplicate
