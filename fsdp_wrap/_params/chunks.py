"""`Cut`: the chunks of one parameter, and their places in the buffers of a `DTensorLayout`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._core import ParamSlot, ceil_div, round_up
from fsdp_wrap._params.layout import Extent, alignment_of
from fsdp_wrap._params.parallel import to_local


@dataclass(frozen=True)
class Cut(Extent):
    """The chunks of one parameter: rank r holds the rows [r x chunk, (r + 1) x chunk), as by `torch.chunk`.

    For a parameter that is distributed already, the chunks of the part on this rank.

    Attributes:
        dim: The dimension that is cut; its indices are called rows here.
        offset: Index of a rank's chunk in its part of the gathered buffer.
    """

    dim: int
    ranks: int
    offset: int

    @functools.cached_property
    def chunk(self) -> int:
        """Rows of a whole chunk."""
        return ceil_div(self.shape[self.dim], self.ranks)

    @functools.cached_property
    def whole(self) -> int:
        """Number of ranks with a whole chunk; the next rank holds the rest, the others nothing."""
        return self.shape[self.dim] // self.chunk if self.shape.numel() else 0

    @functools.cached_property
    def rest(self) -> int:
        """Rows of the last, smaller chunk."""
        return self.shape[self.dim] - self.whole * self.chunk if self.shape.numel() else 0

    @functools.cached_property
    def folded(self) -> torch.Size | None:
        """The shape (ranks, rows, others), if rows are the first dimension and all chunks are whole."""
        if self.dim or self.rest or not self.whole:
            return None
        return torch.Size([self.whole, self.chunk, *self.shape[1:]])

    @property
    def chunk_numel(self) -> int:
        """Elements of a whole chunk."""
        return self.shape_of(self.chunk).numel()

    @property
    def end(self) -> int:
        """Index after a rank's whole chunk in its part."""
        return self.offset + self.chunk_numel

    def shape_of(self, rows: int) -> torch.Size:
        """Returns the shape of so many rows."""
        return torch.Size([*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]])

    def first_row(self, rank: int) -> int:
        """Returns a rank's first row."""
        return min(rank * self.chunk, self.shape[self.dim])

    def rows(self, rank: int) -> int:
        """Returns the number of a rank's rows."""
        return self.first_row(rank + 1) - self.first_row(rank)

    def boxes(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of all parts (ranks x shard): (ranks, rows, others); the rest (rows, others)."""
        found = []
        if self.whole:
            chunks = parts[: self.whole, self.offset : self.end]
            found.append(chunks.view(self.whole, *self.shape_of(self.chunk)).movedim(self.dim + 1, 1))
        if self.rest or not self.whole:  # an empty view as well
            shape = self.shape_of(self.rest)
            chunk = parts[self.whole, self.offset : self.offset + shape.numel()]
            found.append(chunk.view(shape).movedim(self.dim, 0))
        return found

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a tensor of the parameter's shape that correspond to the `boxes`."""
        if self.folded is not None:
            return [tensor.view(self.folded)]
        rows = tensor.movedim(self.dim, 0) if self.dim else tensor
        found = []
        if self.whole:
            whole = rows[: self.whole * self.chunk]
            found.append(whole.view(self.whole, self.chunk, *rows.shape[1:]))
        if self.rest or not self.whole:
            first = self.whole * self.chunk
            found.append(rows[first : first + self.rest])
        return found

    def padding(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the elements that belong to no row."""
        first = self.offset + self.shape_of(self.rest).numel()
        return [
            parts[self.whole : self.whole + 1, first : self.end],
            parts[self.whole + 1 :, self.offset : self.end],
        ]


def cut_all(slots: Sequence[ParamSlot], dims: Sequence[int], ranks: int) -> list[Cut]:
    alignment = alignment_of(slots)
    cuts: list[Cut] = []
    start = offset = 0
    for slot, dim in zip(slots, dims):
        cut = Cut(slot.fqn, to_local(slot.param).shape, start, dim, ranks, offset)
        start, offset = round_up(cut.stop, alignment), round_up(cut.end, alignment)
        cuts.append(cut)
    return cuts


def chunk_numel(slot: ParamSlot, dim: int, ranks: int) -> int:
    """Returns the elements of a whole chunk of a parameter that is not empty."""
    return Cut(slot.fqn, to_local(slot.param).shape, 0, dim, ranks, 0).chunk_numel


def only_rows(cut: Cut) -> Cut:
    if cut.dim != 0:
        raise ValueError(
            f"parameter '{cut.fqn}' is cut along dimension {cut.dim}, so that no rank holds one contiguous "
            "piece of it; save it as the DTensor that state_dict() of its module has"
        )
    return cut
