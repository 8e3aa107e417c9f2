"""The parameters that modules of a unit show: the sharded ones, or the full ones (the leaves)."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import chain, repeat
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._core import REFUSED_HOOKS_OF, ModuleWriter, ParamPlaces, set_weakly, sets_itself

_GONE = object()


class Showing(Enum):
    """The parameters that modules show in training."""

    SHARDED = "sharded"
    LEAVES = "leaves"
    KEPT = "kept"  # attributes show the leaves; `parameters()`, and so optimizers, the sharded parameters


class SegmentDisplay:
    """The places in modules that show the parameters of one segment.

    Args:
        fqns: Names of the original parameters.
        places: For each of them, all places that show it.
        sharded: Tensors to show while sharded: parameters, or plain tensors under their names.

    Attributes:
        places: As given.
        registries: The `_parameters` of each place's module.
        names: The name at each place.
        expected: What `_parameters` holds at each place while sharded; None behind a plain tensor.
        covered: The `__dict__` of each place's module, if plain tensors are shown there while sharded.
        plain: These tensors, for each place.
        full: The leaf for each place.
        setters: Modules that have more to do when they get a parameter, as numbers of places and functions.
        firsts: Registry and name of the first place of each parameter.
    """

    def __init__(
        self,
        fqns: Sequence[str],
        places: Sequence[ParamPlaces],
        sharded: Sequence[torch.Tensor],
    ) -> None:
        self.places, self._fqns = places, fqns
        self._modules_hold_plain = not isinstance(sharded[0], nn.Parameter)
        everywhere = [*chain.from_iterable(places)]
        self.registries = tuple([module._parameters for module, _ in everywhere])
        self.names = tuple([name for _, name in everywhere])
        self.firsts: tuple[Sequence[dict[str, Any]], Sequence[str]] = self.registries, self.names
        if len(everywhere) > len(places):
            firsts = [next(iter(several)) for several in places]
            self.firsts = [module._parameters for module, _ in firsts], [name for _, name in firsts]
        self.expected: Sequence[nn.Parameter | None] = (None,) * len(everywhere)
        self.covered: Sequence[dict[str, Any]] = ()
        self.plain: Sequence[torch.Tensor] = ()
        if self._modules_hold_plain:
            self.covered, self.plain = self._attributes, self._everywhere(sharded)
        else:
            self.expected = self._everywhere(sharded)
        self.setters = tuple(
            [
                (number, partial(set_weakly, weakref.ref(module), name))
                for number, (module, name) in enumerate(everywhere)
                if sets_itself(module)
            ]
        )
        self._behind: Sequence[Any] = ()
        self.take_leaves(())

    def take_leaves(self, leaves: Sequence[nn.Parameter]) -> None:
        """Takes the full parameters, or others than before, to show them later."""
        self._leaves, self.full = leaves, self._everywhere(leaves)

    def _everywhere(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Returns, for each place, the tensor of the parameter that it shows."""
        if len(self.names) == len(self.places):
            return tensors
        return [tensor for several, tensor in zip(self.places, tensors) for _ in several]

    @cached_property
    def _attributes(self) -> Sequence[dict[str, Any]]:
        """The `__dict__` of each place's module."""
        return tuple([module.__dict__ for module, _ in chain.from_iterable(self.places)])

    @property
    def leaves(self) -> ModuleWriter:
        """Shows the full parameters."""
        return ModuleWriter(self.places, self._leaves, self._modules_hold_plain)

    def show_sharded(self) -> None:
        """Shows the sharded parameters."""
        for number, set_there in self.setters:
            set_there(self.expected[number])
        for registry, name, param in zip(self.registries, self.names, self.expected):
            registry[name] = param
        for attributes, name, tensor in zip(self.covered, self.names, self.plain):
            attributes[name] = tensor

    def cover_while_sharded(self) -> None:
        """Lets attributes show the leaves while sharded: they are the shard, so no gradient is lost."""
        self.plain = self.full

    def show_others(self, params: Sequence[torch.Tensor]) -> None:
        """Shows other tensors, one for each original parameter."""
        ModuleWriter(self.places, params, self._modules_hold_plain).show()

    def shown(self) -> list[nn.Parameter | None]:
        """Returns the registered parameter, if any, for each original one."""
        return [*map(dict.get, *self.firsts)]

    def is_untouched(self) -> bool:
        """Whether modules still hold the sharded parameters, and none of these has a hook that cannot run."""
        shown = map(dict.get, self.registries, self.names, repeat(_GONE))
        same = all(map(operator.is_, shown, self.expected))
        return same and (self._modules_hold_plain or not any(map(REFUSED_HOOKS_OF, self.expected)))

    def replaced(self) -> Iterator[tuple[str, Any]]:
        """Yields the name of each replaced parameter with its replacement, None if it was removed."""
        fqns = self._everywhere(self._fqns)
        for fqn, registry, name, expected in zip(fqns, self.registries, self.names, self.expected):
            shown = registry.get(name, _GONE)
            if shown is not expected:
                yield fqn, None if shown is _GONE else shown

    def hooked(self) -> Iterator[str]:
        """Yields the names of parameters with hooks that cannot run."""
        for fqn, param in zip(self._everywhere(self._fqns), self.expected):
            if param is not None and REFUSED_HOOKS_OF(param):
                yield fqn

    def cover(self) -> None:
        """Shows the leaves by attributes; `parameters()` and state dicts go on with the sharded ones."""
        self._behind = [*map(dict.get, self._attributes, self.names, repeat(_GONE))]
        for attributes, name, leaf in zip(self._attributes, self.names, self.full):
            attributes[name] = leaf

    def uncover(self) -> None:
        """Undoes `cover`, save for attributes that somebody has set since."""
        places = zip(self._attributes, self.names, self.full, self._behind)
        for attributes, name, leaf, behind in places:
            if attributes.get(name) is leaf:
                attributes[name] = behind
                if behind is _GONE:
                    del attributes[name]
        self._behind = ()


class _Coverable(Protocol):
    params: Any  # with the display

    def cover(self) -> None: ...

    def uncover(self) -> list[str]: ...


class UnitDisplay:
    """The display of one unit in training.

    Attributes:
        state: The shown parameters, unless others are in the user's hands.
        changed: Names of parameters that were changed while the leaves were shown; the reader empties it.
    """

    def __init__(self, segments: Sequence[_Coverable]) -> None:
        self._segments = segments
        self.state = Showing.LEAVES
        self.changed: list[str] = []
        self.show_sharded()

    @property
    def untouched(self) -> bool:
        """Whether no leaf is known to have changed, and no shown parameter to have been replaced."""
        for segment in self._segments if self.state is Showing.SHARDED else ():
            if not segment.params.display.is_untouched():
                return False
        return not self.changed

    def show_leaves(self) -> None:
        """Lets the modules compute with the leaves."""
        if self.state is not Showing.LEAVES:
            if self.state is Showing.KEPT:
                self._uncover()
                for segment in self._segments:  # before the leaves hide replacements
                    if not segment.params.display.is_untouched():
                        self.changed += [fqn for fqn, _ in segment.params.display.replaced()]
            self.state = Showing.LEAVES
            for segment in self._segments:
                display = segment.params.display
                for number, set_there in display.setters:
                    set_there(display.full[number])
                for attributes, name in zip(display.covered, display.names):
                    attributes.pop(name, None)
                for registry, name, leaf in zip(display.registries, display.names, display.full):
                    registry[name] = leaf

    def show_sharded(self) -> None:
        """Lets the modules show the sharded parameters."""
        if self.state is Showing.LEAVES:
            for segment in self._segments:
                segment.params.display.show_sharded()
        elif self.state is Showing.KEPT:
            self._uncover()
        self.state = Showing.SHARDED

    def show_kept(self) -> None:
        """Lets attributes of modules show the leaves that a forward has kept for its backward."""
        self.show_sharded()
        self.state = Showing.KEPT
        for segment in self._segments:
            segment.cover()

    def _uncover(self) -> None:
        for segment in self._segments:
            self.changed += segment.uncover()
