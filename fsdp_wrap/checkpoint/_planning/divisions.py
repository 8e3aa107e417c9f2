"""Divisions: how tensors are cut into boxes, for all ranks at once.

A division says the same on all ranks that hold a tensor between them. It has places, each with its boxes.
Which rank is at which place is told apart from it, since many groups of ranks share a division.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from fsdp_wrap._core.torch_private import StridedShard
from fsdp_wrap._params import boxes_of
from fsdp_wrap.checkpoint._manifest import Box


@dataclass(frozen=True)
class Division(ABC):
    """How a tensor of a shape is cut."""

    shape: tuple[int, ...]

    @abstractmethod
    def boxes(self) -> list[list[Box]]:
        """Returns the boxes of each place."""

    @property
    def divides(self) -> bool:
        """Whether all places together have the whole tensor, and no two of them the same of it."""
        return False

    def numels(self) -> torch.Tensor:
        """Returns the number of elements of each place."""
        return torch.tensor([sum(math.prod(sizes) for _, sizes in of_place) for of_place in self.boxes()])


@dataclass(frozen=True)
class AsHeld(Division):
    """The boxes that one rank holds; nothing is known of other ranks."""

    held: tuple[Box, ...]

    def boxes(self) -> list[list[Box]]:
        return [[*self.held]]


@dataclass(frozen=True)
class ByRows(Division):
    """The boxes of a `DTensor`: its dimensions are divided over dimensions of the mesh."""

    mesh: tuple[int, ...]
    divided: tuple[tuple[int, int], ...]
    """Dimensions of the mesh and of the tensor; each divides what the one before has left."""

    def boxes(self) -> list[list[Box]]:
        offsets, sizes = (of_places.tolist() for of_places in self._spans())
        return [[box] for box in zip(map(tuple, offsets), map(tuple, sizes))]

    @property
    def divides(self) -> bool:
        over = {axis for axis, _ in self.divided}
        return 0 not in self.shape and all(size == 1 or axis in over for axis, size in enumerate(self.mesh))

    def numels(self) -> torch.Tensor:
        return self._spans()[1].prod(-1)

    def _spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns offsets and sizes, by place and dimension of the tensor."""
        sizes = torch.tensor(self.shape, dtype=torch.int64).expand(*self.mesh, -1).clone()
        offsets = torch.zeros_like(sizes)
        for axis, dim in self.divided:
            count, size = self.mesh[axis], sizes[..., dim].clone()
            numbers = torch.arange(count).view(-1, *(1,) * (len(self.mesh) - axis - 1))
            part = (size + count - 1) // count
            begin = torch.minimum(numbers * part, size)
            offsets[..., dim] += begin
            sizes[..., dim] = torch.minimum(part, size - begin)
        return offsets.flatten(0, -2), sizes.flatten(0, -2)

    @classmethod
    def of(
        cls, shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]
    ) -> ByRows | None:
        """Returns the cut of a `DTensor`; None for placements that it does not know."""
        first: list[tuple[int, int]] = []
        last: list[tuple[int, int]] = []
        for axis, placement in enumerate(placements):
            if getattr(placement, "dim", 0) < 0:
                return None
            if type(placement) is Shard:
                first.append((axis, placement.dim))
            elif type(placement) is StridedShard:
                later = [
                    other for other in range(axis + 1, len(mesh)) if placements[other] == Shard(placement.dim)
                ]
                inner = math.prod(mesh[other] for other in later)
                others = sum(getattr(other, "dim", None) == placement.dim for other in placements)
                is_even = shape[placement.dim] % (inner * mesh[axis]) == 0
                if inner != placement.split_factor or others != len(later) + 1 or not is_even:
                    return None
                last.append((axis, placement.dim))
            elif type(placement) is not Replicate:
                return None
        return cls(shape, mesh, (*first, *last))


@dataclass(frozen=True)
class ByIntervals(Division):
    """The boxes of an `IntervalTensor`: of a part of the tensor, flattened, which lies in a buffer.

    The buffer is cut evenly between `count` ranks, of which each has `length` elements; the part begins at
    `first`.
    """

    part: Box
    count: int
    first: int
    length: int

    def boxes(self) -> list[list[Box]]:
        return [[*self._boxes_of(place)] for place in range(self.count)]

    def _boxes_of(self, place: int) -> Iterator[Box]:
        begins, sizes = self.part
        numel = math.prod(sizes)
        begin = place * self.length - self.first
        start, stop = (0, numel) if self.count == 1 else (max(begin, 0), min(begin + self.length, numel))
        if start < stop or numel == 0:
            for box in boxes_of(sizes, start, stop):
                yield tuple(map(sum, zip(begins, box.offsets))), box.sizes

    @property
    def divides(self) -> bool:
        return 0 not in self.shape and self.part == whole(self.shape)

    def numels(self) -> torch.Tensor:
        numel = math.prod(self.part[1])
        if self.count == 1:
            return torch.tensor([numel])
        begins = torch.arange(self.count) * self.length - self.first
        return (begins + self.length).clamp(0, numel) - begins.clamp(0, numel)


@dataclass(frozen=True)
class Beside(Division):
    """The same boxes on each place that has elements of another tensor."""

    held: tuple[Box, ...]
    other: ByIntervals

    def boxes(self) -> list[list[Box]]:
        return [[*self.held] if numel else [] for numel in self.other.numels().tolist()]


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole tensor."""
    return (0,) * len(shape), shape


def is_empty(box: Box) -> bool:
    """Whether a box has no elements."""
    return 0 in box[1]
