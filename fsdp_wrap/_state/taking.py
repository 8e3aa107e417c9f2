"""`Taking`: one call of `state_dict()`, to which the wrappers of a tree add their parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import UNIT_ATTR, WRAPPED_ATTR, Place, named, params, walk
from fsdp_wrap._runtime import Unit
from fsdp_wrap._state.full_values import offloaded
from fsdp_wrap._state.originals import owned_places

__all__ = ["Taking", "taking"]


class Taking:
    """One call of `state_dict()` with those of the wrappers below it, of which each adds its part.

    What concerns all parts is done once, by the outermost: nested wrappers would each do it for all below.

    Args:
        destination: To which they add.
        module: The outermost one.
        prefix: Of its names.
        wanted: Whether this rank keeps what it adds.

    """

    def __init__(self, destination: dict[str, Any], module: nn.Module, prefix: str, wanted: bool) -> None:
        self.destination, self.wanted = destination, wanted
        self._module, self._prefix = module, prefix
        self._last = next(reversed(destination), None)
        self._aliased: dict[int, tuple[torch.Tensor, bool]] = {}

    def note_aliased(self, unit: Unit, to_host: bool) -> None:
        """Notes a unit's tensors, with which what was added must not share memory in the end.

        These are its buffers, and its parameters, which the user may hold in full now. What it ignores stays
        that of the model, as in the state dict of a plain module, unless all is copied to the host.
        """
        tensors = _tensors(_modules(unit)) if to_host else _taken_tensors(unit)
        self._aliased.update((tensor.untyped_storage()._cdata, (tensor, to_host)) for tensor in tensors)

    @cached_property
    def names(self) -> dict[Place, list[str]]:
        """The names in the result of what every place shows."""
        found: dict[Place, list[str]] = {}
        for fqn, place, _ in named(self._module, params, all_names=True):
            found.setdefault(place, []).append(self._prefix + fqn)
        return found

    def separate(self) -> None:
        """Replaces what was added and shares memory with the model by copies."""
        state_dict = self.destination
        for key in list(takewhile(lambda key: key != self._last, reversed(state_dict))):
            value = state_dict[key]
            if key.startswith(self._prefix) and isinstance(value, torch.Tensor) and not value.is_meta:
                aliased = self._aliased.get(value.untyped_storage()._cdata)
                if aliased is not None:
                    state_dict[key] = offloaded(value, aliased[1])

    def add_metadata(self) -> None:
        """Adds versions under the names of wrapped modules, for which a plain module above looks."""
        metadata = self.destination._metadata  # type: ignore[attr-defined]
        for name, _ in walk(self._module, all_names=True):
            plain = f"{name}.".replace(f"{WRAPPED_ATTR}.", "")
            versions = metadata.get(f"{self._prefix}{plain}".rstrip("."))
            if versions is not None:
                metadata.setdefault(f"{self._prefix}{name}".rstrip("."), versions)


_taking: ContextVar[Taking | None] = ContextVar("fsdp_wrap_taking", default=None)


@contextmanager
def taking(destination: Any, module: nn.Module, prefix: str, wanted: bool) -> Iterator[tuple[Taking, bool]]:
    """Gives the call of which a wrapper's part is taken now, and whether it has just begun."""
    outer = _taking.get()
    if outer is not None and outer.destination is destination:
        yield outer, False
        return
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()
    call = Taking(destination, module, prefix, wanted)
    token = _taking.set(call)
    try:
        yield call, True
    finally:
        _taking.reset(token)


def _taken_tensors(unit: Unit) -> Iterator[torch.Tensor]:
    """Yields what a wrapper's unit, and units of `fully_shard` inside, have taken of their modules."""
    inside = (module.__dict__[UNIT_ATTR] for module in _modules(unit) if UNIT_ATTR in module.__dict__)
    units: list[Unit] = [unit, *inside]
    for module, name in owned_places(units):  # as modules show it now
        shown = module._parameters.get(name, module.__dict__.get(name))
        if shown is not None:
            yield shown
    for held in (held for each in units for held in each.buffers.held):
        yield from (buffer for buffer in held.values() if buffer is not None)


def _modules(unit: Unit) -> Iterator[nn.Module]:
    """Yields a wrapped module and those below, parents first, but not what is below other wrappers."""
    stack, seen = [unit.module._modules[WRAPPED_ATTR]], set[nn.Module | None]()
    while stack:
        current = stack.pop()
        if current is not None and current not in seen and WRAPPED_ATTR not in current._modules:
            seen.add(current)
            yield current
            stack.extend(current._modules.values())


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        tensors = (*module._parameters.values(), *module._buffers.values())
        yield from (tensor for tensor in tensors if tensor is not None)
