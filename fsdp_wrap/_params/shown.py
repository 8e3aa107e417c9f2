"""Whether sharded parameters are as they were left: shown, not written to; and what stands before them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch

from fsdp_wrap._core import REFUSED_HOOKS_OF, Display, Place

_GONE = object()


class Shown(Display):
    """What the places of sharded parameters show while all is as it should be.

    Args:
        places: For each original parameter, all that show it.
        tensors: What they show: parameters, or plain tensors, in whose place no parameter may stand.
    """

    def __init__(self, places: Sequence[Iterable[Place]], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(places, tensors)
        self._indices = [index for index, several in enumerate(places) for _ in several]
        self._registries, self._names, self._expected = zip(*self._params)
        self._distinct = [*dict.fromkeys(param for param in self._expected if param is not None)]

    def is_untouched(self) -> bool:
        """Whether nobody has put anything else there, nor a hook that cannot run."""
        found = map(dict.get, self._registries, self._names, repeat(_GONE))
        same = all(map(operator.is_, found, self._expected))
        return same and not any(map(REFUSED_HOOKS_OF, self._distinct))

    def replaced(self) -> Iterator[tuple[int, Any]]:
        """Yields what was put in the place of an original parameter, with its number; None for nothing."""
        for index, (registry, name, expected) in zip(self._indices, self._params):
            found = registry.get(name, _GONE)
            if found is not expected:
                yield index, None if found is _GONE else found

    def hooked(self) -> Iterator[int]:
        """Yields the numbers of parameters with hooks that cannot run."""
        for index, param in zip(self._indices, self._expected):
            if param is not None and REFUSED_HOOKS_OF(param):
                yield index


class Cover:
    """Tensors that stand before parameters, for who computes with them outside of their module's forward.

    Attributes show them; `parameters()`, and so optimizers, `zero_grad()` and state dicts, what is behind.

    Args:
        places: For each tensor, all that are to show it.
        tensors: The tensors.
    """

    def __init__(self, places: Iterable[Iterable[Place]], tensors: Iterable[torch.Tensor]) -> None:
        self._covers = [
            (module.__dict__, name, tensor)
            for several, tensor in zip(places, tensors)
            for module, name in several
        ]
        self._behind: list[Any] = []

    def put(self) -> None:
        """Lets the attributes show the tensors."""
        self._behind = [names.get(name, _GONE) for names, name, _ in self._covers]
        for names, name, tensor in self._covers:
            names[name] = tensor

    def take_away(self) -> None:
        """Lets the attributes show what they did before, where nobody has set them since."""
        for (names, name, tensor), behind in zip(self._covers, self._behind):
            if names.get(name) is tensor:
                names[name] = behind
                if behind is _GONE:
                    del names[name]
