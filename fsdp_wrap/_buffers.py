"""The two buffers of a layout: one travels, the leaves alias the other; copies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

__all__ = ["Buffers", "Stretches", "pack", "same_elements", "unpack"]


class Buffers(Protocol):
    """How the original parameters of one segment lie in 1-D buffers.

    The shards of all ranks, one after the other, are the buffer that travels. The leaves alias the unsharded
    buffer, which is the same where that is possible; else parameters are copied from one to the other.

    Attributes:
        numel: Elements of the buffer that travels, padding included: `shard_numel` x ranks.
        full_numel: Elements of the unsharded buffer, padding included: a multiple of the ranks.
        in_place: Whether the buffer that travels is the unsharded one.
        shard_numel: Elements of this rank's part.
        noted_numel: How many at the end of each part hold what `note_used` notes.
        sharded: Whether each rank has a part of its own; otherwise its part is the whole.
    """

    numel: int
    full_numel: int
    in_place: bool
    shard_numel: int
    noted_numel: int
    sharded: bool

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of an unsharded buffer, one per original parameter, in its shape."""
        ...

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        """Views of a buffer that travels: for each original parameter the boxes in which it lies."""
        ...

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor of one original parameter's shape that have the shapes of its `parts`."""
        ...

    def packer(self, travelling: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        """Returns what writes one tensor for each original parameter into a buffer that travels.

        Zeros are written to its `padding`.
        """
        ...

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        """Views of those parts of a buffer that travels that belong to no parameter."""
        ...

    def held_by_rank(self) -> list[list[int]]:
        """For each original parameter, how many of its elements each rank holds; these lie in rank order."""
        ...

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts something of the shard's size into this rank's pieces of the original parameters, as views."""
        ...


class Stretches:
    """Where pieces lie one after the other in a 1-D tensor, perhaps with gaps: all views come from one call.

    Args:
        bounds: The (start, stop) of each, in order; equal ones, wherever, for one that is empty.
        length: Of the tensor.
    """

    def __init__(self, bounds: Iterable[tuple[int, int]], length: int) -> None:
        self._sizes: list[int] = []
        self._indices: list[int] = []
        end = 0
        for start, stop in bounds:
            if stop > start > end:
                self._sizes.append(start - end)  # a gap
            self._indices.append(len(self._sizes) if stop > start else -1)
            if stop > start:
                self._sizes.append(stop - start)
                end = stop
        self._sizes += [length - end, 0]  # the last for all that are empty

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns one view per piece."""
        parts = torch.split_with_sizes(tensor, self._sizes)
        return [*map(parts.__getitem__, self._indices)]


def same_elements(
    buffers: Buffers, travelling: torch.Tensor, full: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs views of the two buffers of a layout that must hold the same; none where they are one."""
    if buffers.in_place:
        return []
    return [
        pair
        for index, (view, parts) in enumerate(zip(buffers.views(full), buffers.parts(travelling)))
        for pair in zip(parts, buffers.split(index, view))
    ]


def unpack(buffers: Buffers, travelling: torch.Tensor) -> torch.Tensor:
    """Returns an unsharded buffer with what has travelled: the same tensor where that is possible."""
    if buffers.in_place:
        return travelling
    full = travelling.new_empty(buffers.full_numel)
    for source, target in same_elements(buffers, travelling, full):
        target.copy_(source)
    return full


def pack(buffers: Buffers, full: torch.Tensor) -> torch.Tensor:
    """Undoes `unpack`."""
    if buffers.in_place:
        return full
    travelling = full.new_zeros(buffers.numel)
    for target, source in same_elements(buffers, travelling, full):
        target.copy_(source)
    return travelling
