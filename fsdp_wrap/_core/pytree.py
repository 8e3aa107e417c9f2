"""Finds and replaces the tensors in the arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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


Replaced = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a tensor that was written into a container and the one that was there before."""


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor], value: Any, replaced: Replaced | None = None
) -> Any:
    """Returns `value` with every tensor replaced by `fn(tensor)`.

    A container in which nothing changed is returned as it is, so that the identity of user objects
    survives wherever it can. With `replaced`, lists, mappings and dataclasses are written to.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, _ATOMS):
        return value
    plain = type(value) is tuple
    old, new = value if plain else _children(value), []
    for child in old:  # not in a comprehension, which takes a frame of its own
        new.append(fn(child) if isinstance(child, torch.Tensor) else map_tensors(fn, child, replaced))
    if all(map(operator.is_, old, new)):
        return value
    result = tuple(new) if plain else _rebuild(value, new, in_place=replaced is not None)
    if replaced is not None and result is value:
        replaced.extend(zip(iter_tensors(new), iter_tensors(old)))
    return result


def put_back(replaced: Replaced, value: Any) -> None:
    """Puts the tensors of before back into the containers of `value`; what else has come into them stays."""
    originals: dict[int, torch.Tensor] = {}
    for new, old in replaced:
        originals[id(new)] = originals.get(id(old), old)
    map_tensors(lambda tensor: originals.get(id(tensor), tensor), value, [])


def _children(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, (dict, Mapping)):  # asking for the former is cheap
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:
        return list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    return []


def _rebuild(value: Any, children: list[Any], in_place: bool) -> Any:
    write: Callable[[Any, Any, Any], None] = operator.setitem
    keys: Any = range(len(children))
    if isinstance(value, (set, frozenset)):
        return type(value)(children)
    if isinstance(value, tuple):
        return getattr(type(value), "_make", type(value))(children)  # named tuples take no iterable
    if isinstance(value, MutableMapping):
        keys = [*value]
    elif isinstance(value, Mapping):
        return type(value)(dict(zip(value, children)))  # type: ignore[call-arg]  # of what is read only
    elif dataclasses.is_dataclass(value):
        keys = [field.name for field in dataclasses.fields(value)]
        write = object.__setattr__  # also for frozen dataclasses
    elif not isinstance(value, (list, deque)):
        node = pytree.SUPPORTED_NODES[type(value)]
        return node.unflatten_fn(children, node.flatten_fn(value)[1])
    # A copy keeps subclasses and their attributes, such as a default factory.
    target = value if in_place else copy.copy(value)
    for key, child in zip(keys, children):
        write(target, key, child)
    return target
