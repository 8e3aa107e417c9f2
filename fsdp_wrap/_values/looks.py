"""`Looks`: looks at tensors in the order of a step, and keeps the first that is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fsdp_wrap._values.finding import NonFinite, details, extremes, index_at, looked_at, quoted

Named = tuple[str, torch.Tensor]
"""A tensor with its name."""

_BEFORE = 3
"""Looks before a finding that its message tells of."""


class Spot(NamedTuple):
    """A place in a step: phase, unit, module."""

    phase: str
    unit: str
    module: str

    def __str__(self) -> str:
        return f"{self.phase} of {quoted(self.module)}"


class Origin(NamedTuple):
    """Where a tensor that is not finite comes from: the place to name, and a sentence."""

    place: Spot
    made: bool
    told: str


class _Flag(NamedTuple):
    """A look whose result is on the device."""

    look: int
    origin: Origin
    names: Sequence[str]
    shapes: Sequence[torch.Size]
    low: torch.Tensor
    high: torch.Tensor


class Looks:
    """Looks at tensors of one rank.

    Args:
        rank: Global rank.
        deferred: Whether results stay on the device until `settle`, since reading each would wait for it.

    Attributes:
        found: The first finding since the last `take`.
    """

    def __init__(self, rank: int, deferred: bool) -> None:
        self._rank, self._deferred = rank, deferred
        self.found: NonFinite | None = None
        self._iteration = self._count = 0
        self._recent: deque[tuple[str, float]] = deque(maxlen=_BEFORE)
        self._here: dict[Spot, float] = {}  # the last finite largest values, of earlier iterations too
        self._flags: list[_Flag] = []

    def restart(self, iteration: int) -> None:
        """Begins an iteration."""
        self._iteration, self._count = iteration, 0
        self._recent.clear()

    def at(self, origin: Origin, tensors: Iterable[Named]) -> Named | None:
        """Looks at tensors, unless something was found already.

        Args:
            origin: Where they come from if they are the first that are not finite.
            tensors: With their names.

        Returns:
            The first that is not finite, for `report`; None also where results are read later.
        """
        self._count += 1
        if self.found is not None:
            return None
        seen = [(name, each) for name, tensor in tensors if (each := looked_at(tensor)) is not None]
        if not seen:
            return None
        if self._deferred:
            pairs = [extremes(each) for _, each in seen]
            low, high = (torch.stack([each.double() for each in column]) for column in zip(*pairs))
            names, shapes = [name for name, _ in seen], [each.shape for _, each in seen]
            self._flags.append(_Flag(self._count, origin, names, shapes, low, high))
            return None
        largest = 0.0
        for name, tensor in seen:
            low, high = extremes(tensor)
            first, last = low.item(), high.item()
            if not (math.isfinite(first) and math.isfinite(last)):
                return name, tensor
            largest = max(largest, -first, last)
        self._note(origin.place, largest)
        return None

    def _note(self, place: Spot, largest: float) -> None:
        self._recent.append((str(place), largest))
        self._here[place] = largest

    def look(self, origin: Origin, tensors: Iterable[Named]) -> None:
        """Looks at tensors, and keeps the first that is not finite."""
        hit = self.at(origin, tensors)
        if hit is not None:
            self.report(origin, hit)

    def report(
        self, origin: Origin, named: Named, start: int = 0, shape: Sequence[int] | None = None
    ) -> None:
        """Keeps a tensor that is not finite, if it is the first.

        Args:
            origin: Where it comes from.
            named: The tensor, perhaps a piece of a flattened one.
            start: Index of the piece's first element.
            shape: Shape of the whole tensor, if it is a piece.
        """
        if self.found is not None:
            return
        name, tensor = named
        index, nan, inf, low, high = details(tensor)
        if shape is not None:
            index = index_at(start + index[0], shape)
        whole = tuple(tensor.shape if shape is None else shape)
        self._keep(origin, self._count, name, index, whole, (nan, inf), (low, high))

    def _keep(
        self,
        origin: Origin,
        look: int,
        name: str,
        index: tuple[int, ...] | None,
        shape: tuple[int, ...],
        counts: tuple[int, int],
        finite: tuple[float, float],
    ) -> None:
        place, made, told = origin
        before = [*self._recent]
        if place in self._here:
            before.append(("the last finite one here", self._here[place]))
        self.found = NonFinite(
            *(self._rank, self._iteration, look, made, *place, name, told, index, shape),
            *(*counts, *finite, tuple(before)),
        )

    def settle(self) -> None:
        """Reads the results that are still on a device, at once for all."""
        flags, self._flags = self._flags, []
        if not flags or self.found is not None:
            return
        low = torch.cat([each.low for each in flags])
        lows, highs = torch.stack([low, torch.cat([each.high for each in flags])]).tolist()
        at = 0
        for flag in flags:
            pairs = [*zip(lows[at : at + len(flag.names)], highs[at : at + len(flag.names)])]
            at += len(flag.names)
            wrong = next((n for n, pair in enumerate(pairs) if not all(map(math.isfinite, pair))), None)
            if wrong is not None:
                unknown = (-1, -1), (math.nan, math.nan)
                self._keep(
                    flag.origin, flag.look, flag.names[wrong], None, tuple(flag.shapes[wrong]), *unknown
                )
                return
            self._note(flag.origin.place, max(max(-first, last) for first, last in pairs))

    def take(self) -> NonFinite | None:
        """Returns the finding, and begins anew."""
        self.settle()
        found, self.found = self.found, None
        return found
