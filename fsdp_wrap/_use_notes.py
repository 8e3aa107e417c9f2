"""`UseNotes`: by which the ranks tell each other, in a reduction, whose gradients they have contributed to.

Where a rank has no gradient its contribution is -0.0. A sum of zeros is -0.0 only if all of them are, so one
number of each piece is enough to note it, and nothing more travels: who has used the parameter makes sure
that this number is not -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

__all__ = ["UseNotes"]


class _Place(Protocol):
    """Where this rank stands among those that hold the parameters between them."""

    rank: int
    device: torch.device


class UseNotes:
    """Which parameters that lie side by side in a buffer were used; noted at the begin of each piece.

    Args:
        bounds: The (start, stop) of each parameter.
        shard_numel: Elements of each rank's part of the buffer.
        place: Of this rank.
        together: Whether all are one for the optimizer, so that one that was used speaks for all.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], shard_numel: int, place: _Place, together: bool
    ) -> None:
        marks = [_begins(start, stop, shard_numel) for start, stop in bounds]
        if together:
            firsts = {mark // shard_numel: mark for mark in reversed([*chain.from_iterable(marks)])}
            marks = [sorted(firsts.values())] * len(bounds)
        self._marks, self._bounds, self._together = marks, bounds, together
        self._first, self._length = place.rank * shard_numel, shard_numel
        own = range(self._first, self._first + shard_numel)
        self._own = [next((mark - self._first for mark in each if mark in own), None) for each in marks]
        with torch.inference_mode(False):
            every = sorted({*chain.from_iterable(marks)})
            self._every = torch.tensor(every, dtype=torch.int64, device=place.device)

    def write(self, full: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes what this rank has used, in its contribution of all ranks' parts."""
        index = self._every
        if False in used:
            some = {mark for marks, mine in zip(self._marks, used) if mine for mark in marks}
            index = torch.tensor(sorted(some), dtype=torch.int64, device=full.device)
        full.index_add_(0, index, full.new_zeros(index.numel()))  # -0.0 + 0.0 is 0.0

    def write_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes what all ranks have used in what this rank has got of a sum."""
        for (start, stop), mark, by_any in zip(self._bounds, self._own, used):
            if mark is None:
                continue
            if by_any or (self._together and any(used)):
                shard[mark] += 0.0
            else:
                shard[max(0, start - self._first) : max(0, stop - self._first)] = -0.0

    def read(self, shard: torch.Tensor, used: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
        """For each parameter, whether any rank has used it, where this one holds a piece of it.

        Args:
            shard: What this rank has got of the sum.
            used: What this rank has used, and so need not look for.
            wanted: Of which parameters it matters.
        """
        open_marks: dict[int | None, bool] = {
            mark: False
            for mark, mine, matters in zip(self._own, used, wanted)
            if matters and not mine and mark is not None
        }
        if open_marks and not (self._together and any(used)):
            index = torch.tensor([*open_marks], device=shard.device)
            open_marks.update(zip(open_marks, map(_is_noted, shard[index].tolist())))
        return [mine or open_marks.get(mark, False) for mark, mine in zip(self._own, used)]


def _begins(start: int, stop: int, length: int) -> list[int]:
    """Where the pieces begin into which even parts of this length cut a parameter."""
    return [start, *range(start // length * length + length, stop, length)] if stop > start else []


def _is_noted(number: float) -> bool:
    return number != 0 or math.copysign(1, number) > 0
