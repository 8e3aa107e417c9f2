"""Views: how one parameter is cut into matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """One matrix in a parameter.

    Attributes:
        offsets: Index of its first element in the parameter.
        sizes: Its extent along each dimension of the parameter.
        shape: Rows and columns.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.shape[0] * self.shape[1]

    @property
    def cost(self) -> int:
        """The cost of computing with it, by which owners share the work: rows x columns x the smaller."""
        return self.numel * min(self.shape)


View = Callable[[torch.Size], list[Block]]
"""Takes the shape of a parameter, and returns the matrices in it; raises ValueError if it has none such."""


def whole(shape: torch.Size) -> list[Block]:
    """The view of a parameter that is one matrix."""
    if len(shape) != 2:
        raise ValueError(
            f"has {len(shape)} dimensions, and a matrix has two: leave it out by select, or say by view "
            "which matrices it is made of, as batch() does for stacked experts"
        )
    return _cut(shape, 0, [shape[0]])


def per_head(heads: int, dim: int = 0) -> View:
    """Returns the view of a projection that has as many even parts as there are heads.

    Args:
        heads: How many; of fused query, key and value those of all three.
        dim: The dimension that is cut: 0 for projections before attention, 1 for the one after it.
    """

    def view(shape: torch.Size) -> list[Block]:
        size = _matrix(shape)[dim]
        if heads < 1 or size % heads:
            raise ValueError(f"has {size} along dimension {dim}, which per_head({heads}) cannot cut evenly")
        return _cut(shape, dim, [size // heads] * heads)

    return view


def split(sizes: Sequence[int], dim: int = 0) -> View:
    """Returns the view of a fused projection: one matrix for each of the sizes.

    Args:
        sizes: Sizes of the parts, in order.
        dim: The dimension that is cut: 0 the rows, 1 the columns.
    """

    def view(shape: torch.Size) -> list[Block]:
        if min(sizes) < 1 or sum(sizes) != _matrix(shape)[dim]:
            raise ValueError(f"has {shape[dim]} along dimension {dim}, and split() takes {sum(sizes)}")
        return _cut(shape, dim, sizes)

    return view


def batch() -> View:
    """Returns the view of stacked matrices, as of experts: the last two dimensions are those of each."""

    def view(shape: torch.Size) -> list[Block]:
        if len(shape) < 3:
            raise ValueError(f"has {len(shape)} dimensions, and batch() takes three or more")
        rows, columns = shape[-2:]
        sizes = (*(1,) * (len(shape) - 2), rows, columns)
        places = itertools.product(*map(range, shape[:-2]))
        return [Block((*place, 0, 0), sizes, (rows, columns)) for place in places]

    return view


def _matrix(shape: torch.Size) -> torch.Size:
    if len(shape) != 2:
        raise ValueError(f"has {len(shape)} dimensions, and this view cuts matrices, which have two")
    return shape


def _cut(shape: torch.Size, dim: int, sizes: Sequence[int]) -> list[Block]:
    starts = itertools.accumulate(sizes, initial=0)
    blocks = []
    for start, size in zip(starts, sizes):
        part = (size, shape[1]) if dim == 0 else (shape[0], size)
        blocks.append(Block((start, 0) if dim == 0 else (0, start), part, part))
    return blocks
