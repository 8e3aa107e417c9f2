"""`Box`: rectangular parts of a tensor, of which every interval of the flattened one is a handful."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Box", "boxes_of"]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor that is contiguous in it.

    Attributes:
        offsets: Index of its first element.
        sizes: Its shape.
        first: Index of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.sizes).numel()


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts the interval [start, stop) of a flattened tensor into at most 2 x dimensions - 1 boxes, in order.

    An empty interval has none, save that of a tensor without elements: that has one, of the whole shape.
    """
    if torch.Size(shape).numel() == 0:
        yield Box((0,) * len(shape), shape, 0)
    elif start < stop and not shape:
        yield Box((), (), 0)
    elif start < stop:
        yield from _boxes(shape, start, stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row  # whole rows: [first, last)
    if first > last:  # inside of one row
        yield from _within_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _within_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _within_row(shape, last, last * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    base = index * torch.Size(shape[1:]).numel()
    for box in _boxes(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), base + box.first)
