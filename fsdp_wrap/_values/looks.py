"""`Looks`: looks at tensors in the order of a step, and keeps the first that is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fsdp_wrap._params import to_local
from fsdp_wrap._values.finding import NonFinite, first_true, index_at, looked_at, quoted
from fsdp_wrap._values.pieces import Piece

_BEFORE = 3
"""Looks before a finding that its message tells of."""

_NO_NUMBERS = torch.empty(0)


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


class Hit(NamedTuple):
    """A tensor with its name, and its origin if it is the first that is not finite."""

    origin: Origin
    name: str
    piece: Piece


class _Unread(NamedTuple):
    """A look that is to be read.

    Attributes:
        look: Number of the look.
        origin: Where the tensors come from.
        what: Begins their names.
        pieces: The tensors; without their numbers where they are read later.
        seen: The places of those that can be looked at.
        extremes: The least and the largest element of each of these, perhaps on a device.
    """

    look: int
    origin: Origin
    what: str
    pieces: Sequence[Piece]
    seen: Sequence[int]
    extremes: Sequence[torch.Tensor]


def named(origin: Origin, what: str, pieces: Iterable[Piece]) -> list[Hit]:
    """Names pieces: parameters by their names, others by their number, unless there is one alone."""
    hits = [*pieces]
    several = len(hits) > 1
    return [
        Hit(_of_module(origin, piece.fqn), f"{what} '{piece.fqn}'", piece)
        if piece.fqn
        else Hit(origin, f"{what} {number}" if several else f"the {what}", piece)
        for number, piece in enumerate(hits)
    ]


def _of_module(origin: Origin, fqn: str) -> Origin:
    """Returns an origin in the module that has a parameter."""
    return origin._replace(place=origin.place._replace(module=fqn.rpartition(".")[0]))


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the least and the largest element, which are both NaN if any is."""
    low, high = torch.aminmax(tensor)
    if type(low) is torch.Tensor:
        return low, high
    # Those of a tensor subclass are made plain, which others can be stacked with.
    return torch.tensor(low.item(), device=low.device), torch.tensor(high.item(), device=low.device)


class Looks:
    """Looks at tensors of one rank.

    Args:
        rank: Global rank.
        deferred: Whether results stay on the device until `settle`, since reading each would wait for it.

    Attributes:
        finding: The first one since the last `take`.
    """

    def __init__(self, rank: int, deferred: bool) -> None:
        self._rank, self._deferred = rank, deferred
        self.finding: NonFinite | None = None
        self._iteration = self._count = 0
        self._recent: deque[tuple[str, float]] = deque(maxlen=_BEFORE)
        self._here: dict[Spot, float] = {}  # the last finite largest values, of earlier iterations too
        self._unread: list[_Unread] = []

    def restart(self, iteration: int) -> None:
        """Begins an iteration."""
        self._iteration, self._count = iteration, 0
        self._recent.clear()

    def look(
        self,
        origin: Origin,
        what: str,
        pieces: Iterable[Piece],
        trace: Callable[[Hit], Hit] = lambda hit: hit,
    ) -> None:
        """Looks at tensors, and keeps the first that is not finite, unless something was found already.

        Args:
            origin: Where they come from.
            what: Begins their names.
            pieces: The tensors.
            trace: Returns what to tell of in place of a tensor that is not finite; only where that is known
                at once.
        """
        self._count += 1
        if self.finding is not None:
            return
        pieces = [*pieces]
        tensors = [looked_at(piece.data) for piece in pieces]
        seen = [place for place, tensor in enumerate(tensors) if tensor is not None]
        extremes = [extreme for tensor in tensors if tensor is not None for extreme in _extremes(tensor)]
        if self._deferred:
            pieces = [piece._replace(data=_NO_NUMBERS) for piece in pieces]
        if seen:
            self._unread.append(_Unread(self._count, origin, what, pieces, seen, extremes))
            if not self._deferred:
                self.settle(trace)

    def settle(self, trace: Callable[[Hit], Hit] = lambda hit: hit) -> None:
        """Reads all unread results at once."""
        unread, self._unread = self._unread, []
        if not unread or self.finding is not None:
            return
        read = iter(torch.stack([extreme for look in unread for extreme in look.extremes]).tolist())
        for look, origin, what, pieces, seen, _ in unread:
            pairs = [(next(read), next(read)) for _ in seen]
            wrong = [place for place, pair in zip(seen, pairs) if not all(map(math.isfinite, pair))]
            if wrong:
                hit = named(origin, what, pieces)[wrong[0]]
                self.finding = self._finding(look, hit if self._deferred else trace(hit))
                return
            self._here[origin.place] = max(max(-low, high) for low, high in pairs)
            self._recent.append((str(origin.place), self._here[origin.place]))

    def _finding(self, look: int, hit: Hit) -> NonFinite:
        (place, made, told), name, piece = hit
        before = [*self._recent]
        if place in self._here:
            before.append(("the last finite one here", self._here[place]))
        index, nan, inf, least, largest = None, -1, -1, math.nan, math.nan
        real = looked_at(piece.data)
        if real is not None:
            local = to_local(piece.data).detach()
            finite = real[torch.isfinite(real)]
            index = index_at(piece.start + first_true(~torch.isfinite(local)), piece.shape)
            nan, inf = int(torch.isnan(local).sum()), int(torch.isinf(local).sum())
            if finite.numel():
                least, largest = (extreme.item() for extreme in torch.aminmax(finite))
        return NonFinite(
            *(self._rank, self._iteration, look, made, *place, name, told, index, tuple(piece.shape)),
            *(nan, inf, least, largest, tuple(before)),
        )

    def take(self) -> NonFinite | None:
        """Returns the finding, and forgets it."""
        self.settle()
        finding, self.finding = self.finding, None
        return finding
