"""The parameters that modules of a unit show: the sharded ones, or the full ones (the leaves)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._core import REFUSED_HOOKS_OF, ModuleWriter, ParamPlaces

_GONE = object()


class Showing(Enum):
    """The parameters that modules show in training."""

    SHARDED = "sharded"
    LEAVES = "leaves"
    KEPT = "kept"  # attributes show the leaves; `parameters()`, and so optimizers, the sharded parameters


class SegmentDisplay(ModuleWriter):
    """The places in modules that show the parameters of one segment.

    Args:
        fqns: Names of the original parameters.
        places: For each of them, all places that show it.
        sharded: Tensors to show while sharded: parameters, or plain tensors under their names.
        leaves: The full parameters; empty before they are made.

    Attributes:
        places: As given.
        leaves: Shows the full parameters.
    """

    def __init__(
        self,
        fqns: Sequence[str],
        places: Sequence[ParamPlaces],
        sharded: Sequence[torch.Tensor],
        leaves: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(places, sharded)
        self.places, self._uncovers = places, not isinstance(sharded[0], nn.Parameter)
        self.leaves = ModuleWriter(places, leaves, self._uncovers)
        self._fqns = [fqn for fqn, several in zip(fqns, places) for _ in several]
        self._registries, self._names, self._expected = zip(*self._params)
        self._distinct = [*dict.fromkeys(param for param in self._expected if param is not None)]
        firsts = [next(iter(several)) for several in places]
        self.firsts = [module._parameters for module, _ in firsts], [name for _, name in firsts]
        self._before = [
            (module.__dict__, name, leaf) for several, leaf in zip(places, leaves) for module, name in several
        ]
        self._behind: list[Any] = []

    show_sharded = ModuleWriter.show

    def cover_while_sharded(self) -> None:
        """Lets attributes show the leaves while sharded: they are the shard, so no gradient is lost."""
        self.writes += [(names.__setitem__, name, leaf) for names, name, leaf in self._before]

    def show_others(self, params: Sequence[torch.Tensor]) -> None:
        """Shows other tensors, one for each original parameter."""
        ModuleWriter(self.places, params, self._uncovers).show()

    def shown(self) -> list[nn.Parameter | None]:
        """Returns the registered parameter, if any, for each original one."""
        return [*map(dict.get, *self.firsts)]

    def is_untouched(self) -> bool:
        """Whether modules still hold the sharded parameters, and none of these has a hook that cannot run."""
        shown = map(dict.get, self._registries, self._names, repeat(_GONE))
        same = all(map(operator.is_, shown, self._expected))
        return same and not any(map(REFUSED_HOOKS_OF, self._distinct))

    def replaced(self) -> Iterator[tuple[str, Any]]:
        """Yields the name of each replaced parameter with its replacement, None if it was removed."""
        for fqn, (registry, name, expected) in zip(self._fqns, self._params):
            shown = registry.get(name, _GONE)
            if shown is not expected:
                yield fqn, None if shown is _GONE else shown

    def hooked(self) -> Iterator[str]:
        """Yields the names of parameters with hooks that cannot run."""
        for fqn, param in zip(self._fqns, self._expected):
            if param is not None and REFUSED_HOOKS_OF(param):
                yield fqn

    def cover(self) -> None:
        """Shows the leaves by attributes; `parameters()` and state dicts go on with the sharded ones."""
        self._behind = [names.get(name, _GONE) for names, name, _ in self._before]
        for names, name, leaf in self._before:
            names[name] = leaf

    def uncover(self) -> None:
        """Undoes `cover`, save for attributes that somebody has set since."""
        for (names, name, leaf), behind in zip(self._before, self._behind):
            if names.get(name) is leaf:
                names[name] = behind
                if behind is _GONE:
                    del names[name]


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
        shown = self._segments if self.state is Showing.SHARDED else ()
        return not self.changed and all([segment.params.display.is_untouched() for segment in shown])

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
                for write, name, leaf in segment.params.display.leaves.writes:
                    write(name, leaf)

    def show_sharded(self) -> None:
        """Lets the modules show the sharded parameters."""
        if self.state is Showing.LEAVES:
            for segment in self._segments:
                for write, name, tensor in segment.params.display.writes:
                    write(name, tensor)
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
