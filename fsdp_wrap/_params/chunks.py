"""`ChunkLayout`: parameters that are cut one by one along a dimension, as `DTensor`s are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from fsdp_wrap._core import ShardAlignment, ceil_div, round_up
from fsdp_wrap._core.torch_private import chunk_cat, foreach_copy_, foreach_zero_
from fsdp_wrap._params.layout import Extent, Layout

_DTYPE = operator.attrgetter("dtype")


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
        """Views `parts` (ranks x shard) as whole chunks (ranks, rows, others) and the rest (rows, others)."""
        boxes = []
        if self.whole:
            chunks = parts[: self.whole, self.offset : self.end]
            boxes.append(chunks.view(self.whole, *self.shape_of(self.chunk)).movedim(self.dim + 1, 1))
        if self.rest or not self.whole:  # an empty view as well
            shape = self.shape_of(self.rest)
            chunk = parts[self.whole, self.offset : self.offset + shape.numel()]
            boxes.append(chunk.view(shape).movedim(self.dim, 0))
        return boxes

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a tensor of the parameter's shape that correspond to the `boxes`."""
        if self.folded is not None:
            return [tensor.view(self.folded)]
        rows = tensor.movedim(self.dim, 0) if self.dim else tensor
        views = []
        if self.whole:
            whole = rows[: self.whole * self.chunk]
            views.append(whole.view(self.whole, self.chunk, *rows.shape[1:]))
        if self.rest or not self.whole:
            first = self.whole * self.chunk
            views.append(rows[first : first + self.rest])
        return views

    def padding(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the elements that belong to no row."""
        first = self.offset + self.shape_of(self.rest).numel()
        return [
            parts[self.whole : self.whole + 1, first : self.end],
            parts[self.whole + 1 :, self.offset : self.end],
        ]


def _rows(like: torch.Tensor, value: int) -> torch.Tensor:
    """Returns rows of one value, which take memory only where the kernel that packs them knows no strides."""
    return like.new_full((1,), value).expand_as(like) if like.is_cpu else torch.full_like(like, value)


@functools.cache
def _only(dtype: torch.dtype) -> frozenset[torch.dtype]:
    return frozenset([dtype])


def _padding(cuts: Sequence[Cut], parts: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of all parts (ranks x shard) that belong to no parameter."""
    gaps = [parts[:, one.end : other.offset] for one, other in zip(cuts, cuts[1:])]
    gaps += [gap for cut in cuts for gap in cut.padding(parts)]
    return [gap for gap in gaps if gap.numel()]


class _BoxPacker:
    """Packs tensors of the parameters' shapes, of any dtype, into their boxes in all parts (ranks x shard).

    It finds the boxes when it is first called. It holds no layout, which a batch would keep alive.
    """

    def __init__(self, cuts: Sequence[Cut], used: slice, parts: torch.Tensor) -> None:
        self._cuts, self._used, self._parts = cuts, used, parts

    @functools.cached_property
    def _boxes(self) -> list[torch.Tensor]:
        return [box for cut in self._cuts for box in cut.boxes(self._parts)]

    @functools.cached_property
    def _gaps(self) -> list[torch.Tensor]:
        return _padding(self._cuts, self._parts)

    @functools.cached_property
    def _notes(self) -> torch.Tensor:
        return self._parts[:, self._used]

    @functools.cached_property
    def _folds(self) -> list[torch.Size] | None:
        """The folded shapes, if all parameters have one."""
        folds = [cut.folded for cut in self._cuts if cut.folded is not None]
        return folds if len(folds) == len(self._cuts) else None

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        if self._folds is not None:
            views = [*map(torch.Tensor.view, tensors, self._folds)]
        else:
            views = [view for cut, tensor in zip(self._cuts, tensors) for view in cut.split(tensor)]
        foreach_copy_(self._boxes, views)
        if self._gaps:
            foreach_zero_(self._gaps)
        self._notes.fill_(1)


class _RowPacker:
    """Packs tensors of the parts' own dtype in one call; others go by their boxes."""

    def __init__(self, cuts: Sequence[Cut], used: slice, parts: torch.Tensor) -> None:
        self._cuts, self._used, self._parts, self._dtypes = cuts, used, parts, _only(parts.dtype)
        starts = [*(cut.offset for cut in cuts[1:]), used.start]
        gaps = [start - cut.end for cut, start in zip(cuts, starts)]
        between = [[_rows(parts[:, :gap], 0)] if gap else [] for gap in gaps]
        between[-1].append(_rows(parts[:, used], 1))  # the rest of a part, for `note_used`
        self._between = [*map(tuple, between)]

    @functools.cached_property
    def _by_boxes(self) -> _BoxPacker:
        return _BoxPacker(self._cuts, self._used, self._parts)

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        if {*map(_DTYPE, tensors)} != self._dtypes:
            self._by_boxes(tensors)
            return
        pieces: list[torch.Tensor] = []
        for tensor, gap in zip(tensors, self._between):
            pieces += (tensor, *gap)
        chunk_cat(pieces, 0, len(self._parts), out=self._parts)


def _chunk_by_chunk(
    shapes: Iterable[tuple[str, torch.Size]], start_at: int, dims: Sequence[int], ranks: int
) -> list[Cut]:
    """Cuts parameters, given by name and shape, and lays the chunks of a rank out side by side."""
    cuts: list[Cut] = []
    start = offset = 0
    for (fqn, shape), dim in zip(shapes, dims):
        cut = Cut(fqn, shape, start, dim, ranks, offset)
        start, offset = round_up(cut.stop, start_at), round_up(cut.end, start_at)
        cuts.append(cut)
    return cuts


def chunk_numel(shape: torch.Size, dim: int, ranks: int) -> int:
    """Returns the elements of a whole chunk of a parameter that is not empty."""
    return Cut("", shape, 0, dim, ranks, 0).chunk_numel


def only_rows(cut: Cut) -> Cut:
    if cut.dim != 0:
        raise ValueError(
            f"parameter '{cut.fqn}' is cut along dimension {cut.dim}, so that no rank holds one contiguous "
            "piece of it; save it as the DTensor that state_dict() of its module has"
        )
    return cut


class ChunkLayout(Layout):
    """Parameters that are cut one by one into one chunk per rank; a rank's chunks lie side by side.

    Behind the chunks lies one number per parameter. There the ranks note the used parameters, in the
    reduction itself, so that all get the same gradients, or None.

    Args:
        shapes: Names and shapes of the original parameters.
        start_at: Number of elements at multiples of which parameters and chunks begin.
        dims: For each parameter, the dimension that is cut.
        rank: This rank among those that hold one copy of the parameters.
        ranks: Number of these.
        sharded: Whether ranks have different chunks.
        alignment: The alignment that the chunks have; this layout does not move them.
    """

    extents: Sequence[Cut]
    packs_rows = True

    def __init__(
        self,
        shapes: Sequence[tuple[str, torch.Size]],
        start_at: int,
        dims: Sequence[int],
        rank: int,
        ranks: int,
        sharded: bool,
        alignment: ShardAlignment | None,
    ) -> None:
        cuts = _chunk_by_chunk(shapes, start_at, dims, ranks)
        end = cuts[-1].end
        self._used, self.noted_numel = slice(end, end + len(cuts)), len(cuts)
        super().__init__(cuts, [cut.fqn for cut in cuts], self._used.stop, rank, ranks)
        self.sharded, self.alignment, self.updated = sharded, alignment, [True] * len(cuts)
        self._offsets = [cut.offset for cut in cuts]
        self._shapes = [cut.shape_of(cut.rows(self.rank)) for cut in cuts]
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self._shapes]
        self.in_place = self.ranks == 1
        if not self.in_place:
            self.full_numel = round_up(cuts[-1].stop, self.ranks)

    def held_by_rank(self) -> list[list[int]]:
        return [
            [only_rows(cut).rows(rank) * cut.shape[1:].numel() for rank in range(self.ranks)]
            for cut in self.extents
        ]

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        starts = map(operator.add, repeat(shard.storage_offset()), self._offsets)
        return [*map(torch.Tensor.as_strided, repeat(shard), self._shapes, self._strides, starts)]

    def own_part(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        cut = self.extents[index]
        return tensor.narrow(cut.dim, cut.first_row(self.rank), cut.rows(self.rank))

    # buffers

    def parts(self, gathered: torch.Tensor) -> list[list[torch.Tensor]]:
        parts = gathered.view(self.ranks, -1)
        return [cut.boxes(parts) for cut in self.extents]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.extents[index].split(tensor)

    def packer(self, gathered: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        parts = gathered.view(self.ranks, -1)
        # In one call, for parameters with the same number of rows on every rank; else it would pad.
        fills = all(cut.folded is not None and cut.whole == self.ranks for cut in self.extents)
        if fills and (gathered.is_contiguous() or gathered.is_cpu):
            return _RowPacker(self.extents, self._used, parts)
        return _BoxPacker(self.extents, self._used, parts)

    def padding(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        return _padding(self.extents, gathered.view(self.ranks, -1))

    # notes on used parameters

    def notes(self, gathered: torch.Tensor) -> torch.Tensor:
        return gathered.view(self.ranks, -1)[:, self._used]

    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        notes.fill_(1)
        for index, mine in enumerate(used):
            if not mine:
                notes[..., index].zero_()

    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        self.note_used(shard[self._used], used)

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool], asked: Sequence[bool]) -> Sequence[bool]:
        unknown = [asks and not mine for asks, mine in zip(asked, used)]
        if not any(unknown):
            return used
        # The host waits for the device to look at numbers: once, and only where it must.
        notes = shard[self._used].tolist()
        return [mine or (ask and note != 0) for mine, ask, note in zip(used, unknown, notes)]
