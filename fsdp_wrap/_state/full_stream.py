"""`iter_full_params`: full parameters one by one, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from fsdp_wrap._core import is_castable, is_owned, named, params, persistent, saved_tensors
from fsdp_wrap._params import FlatParameter
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._state.full_params import original_buffers, settle
from fsdp_wrap._state.full_values import (
    FullValue,
    check_budget,
    full_values,
    handles_of,
    is_first_rank,
    stream,
    value_held_here,
)
from fsdp_wrap._state.originals import Originals, owned_places

__all__ = ["FullParams", "iter_full_params", "param_aliases", "settled_units"]


def iter_full_params(
    module: nn.Module,
    *,
    budget: int | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
    buffers: bool = False,
) -> Generator[tuple[str, torch.Tensor]]:
    """Yields full parameters one by one, in module order, while the next are on their way; collective.

    Every rank iterates with the same arguments. A rank that breaks off early leaves a usable model and no
    work in flight, whatever the others do: closing the iterator, as `break` in a for loop does, takes part in
    the remaining gathers. So that saves nothing; iterate over a submodule where a part is enough. Use
    `contextlib.closing` where the iterator is kept in a variable or the loop may raise, and do not train
    before it is closed: each parameter is yielded as it is when its gather begins.

    Args:
        module: Any module; all units at and below it take part, and parameters outside of units are copied.
        budget: The most bytes alive at any time of what is on its way, the tensor yielded last, and the one
            before it, which a loop's variable holds while the next one is fetched. One parameter is gathered
            in any case. None for twice the largest unit. What the caller keeps is the caller's own.
        rank0_only: Only the first rank gets them (see `summon_full_params`); the others yield the same names
            with tensors on the meta device.
        offload_to_cpu: Yield them in host memory.
        dtype: Cast floating-point parameters to this before they travel, save quantised ones; None for the
            master dtype.
        buffers: Yield the persistent buffers after the parameters, in their own dtype.

    Yields:
        (name in the unwrapped module, full tensor). The tensor is a copy, which stays valid. A tied parameter
        comes once, under the first of its names; `param_aliases` knows the others.

    Raises:
        RuntimeError: At the call: inside a forward, backward or `summon_full_params`; if a parameter is on
            the meta device.
        TypeError: If `budget` is no int, or `dtype` no dtype.
        ValueError: If `budget` is not positive, `dtype` not a floating-point type, or `module` a part of a
            unit.
    """
    params = FullParams(module, "iter_full_params()", dtype=dtype, buffers=buffers)
    return params.stream(budget=budget, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)


def param_aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the further names of tied parameters and buffers, by the one under which they are yielded."""
    owned = owned_places(units_in(module).values())
    names: dict[object, list[str]] = {}
    for fqn, place, tensor in named(module, saved_tensors, all_names=True):
        if place in owned:
            names.setdefault(owned[place].key, []).append(fqn)
        elif tensor is not None and not isinstance(tensor, FlatParameter):
            names.setdefault(id(tensor), []).append(fqn)
    return {first: tuple(others) for first, *others in names.values() if others}


class FullParams:
    """What `iter_full_params` yields, known before anything is gathered.

    Args:
        module: As there.
        doing: Who asks, for messages.
        dtype: As there.
        buffers: As there.

    Raises:
        RuntimeError: As there.
        TypeError: If `dtype` is none.
        ValueError: As there.
    """

    def __init__(
        self, module: nn.Module, doing: str, *, dtype: torch.dtype | None = None, buffers: bool = False
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, not {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, not {dtype}")
        units = settled_units(module, doing)
        self._handles, names = handles_of(units), Originals(module)
        self._values = [_cast(value, dtype) for value in _params(names)]
        self._budget = 2 * names.largest_unit_nbytes()
        self._values += _buffers(module, units) if buffers else []

    def described(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Returns shapes and dtypes by name, in order."""
        return {value.key: (value.shape, value.dtype) for value in self._values}

    def stream(
        self, *, budget: int | None = None, rank0_only: bool = False, offload_to_cpu: bool = False
    ) -> Generator[tuple[str, torch.Tensor]]:
        """Gathers them, as `iter_full_params`; collective."""
        check_budget(budget)
        wanted = not rank0_only or is_first_rank(self._handles)
        return stream(self._values, budget or self._budget, wanted=wanted, to_host=offload_to_cpu)


def settled_units(module: nn.Module, doing: str) -> list[Unit]:
    """Returns the units of a module, resharded to read what they hold.

    Raises:
        RuntimeError: If they are in use.
        ValueError: If `module` is a part of a unit, and so shows only what this rank holds.
    """
    units = list(units_in(module).values())
    settle(units, doing)
    owned = owned_places(units)
    for fqn, (child, name), param in named(module, params):
        hidden = isinstance(child.__dict__.get(name), torch.Tensor)
        foreign = hidden if param is None else is_owned(param) and not isinstance(param, FlatParameter)
        if foreign and (child, name) not in owned:
            raise ValueError(
                f"{doing} needs whole units, but '{fqn}' belongs to a unit around this module: pass the "
                "wrapped module itself"
            )
    return units


def _params(names: Originals) -> Iterator[FullValue]:
    handles = dict.fromkeys(each.handle for each in names.by_name.values() if each.handle is not None)
    owned = {value.key: value for handle in handles for value in full_values(handle)}
    for fqn, original in names.by_name.items():
        if original.key in owned:
            yield replace(owned[original.key], key=fqn)
        else:
            yield value_held_here(fqn, original.source)


def _cast(value: FullValue, dtype: torch.dtype | None) -> FullValue:
    return replace(value, dtype=dtype) if dtype is not None and is_castable(value.dtype) else value


def _buffers(module: nn.Module, units: Iterable[Unit]) -> list[FullValue]:
    with original_buffers(units):
        return [value_held_here(fqn, buffer) for fqn, _, buffer in named(module, persistent)]
