"""`DTensorLayout`: parameters that are cut one by one along a dimension, and shown as `DTensor`s."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import ParamSlot, ShardAlignment, ceil_div, mark_owned, refuse_in_steps, round_up
from fsdp_wrap._core.torch_private import DTensorSpec, TensorMeta, chunk_cat, foreach_copy_, foreach_zero_
from fsdp_wrap._params.layout import Extent, Interval, Layout, Written, alignment_of
from fsdp_wrap._params.parallel import DataMesh, LocalPart, Redistribution, dtensor_of, to_local


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
    """Packs tensors of the parts' own dtype in one call; others go to `otherwise`."""

    def __init__(self, cuts: Sequence[Cut], used: slice, parts: torch.Tensor, otherwise: _BoxPacker) -> None:
        self._parts, self._otherwise, self._dtypes = parts, otherwise, {parts.dtype}
        starts = [*(cut.offset for cut in cuts[1:]), used.start]
        gaps = [start - cut.end for cut, start in zip(cuts, starts)]
        between = [[_rows(parts[:, :gap], 0)] if gap else [] for gap in gaps]
        between[-1].append(_rows(parts[:, used], 1))  # the rest of a part, for `note_used`
        self._between = [*map(tuple, between)]

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        if {*map(_DTYPE, tensors)} != self._dtypes:
            self._otherwise(tensors)
            return
        pieces: list[torch.Tensor] = []
        for tensor, gap in zip(tensors, self._between):
            pieces += (tensor, *gap)
        chunk_cat(pieces, 0, len(self._parts), out=self._parts)


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


_LOCAL, _DTYPE = operator.attrgetter("_local_tensor"), operator.attrgetter("dtype")
_VERSION, _DATA_PTR = operator.attrgetter("_version"), torch.Tensor.data_ptr


class DTensorLayout(Layout):
    """Parameters of one dtype, each cut into one chunk per rank; a rank's chunks lie side by side.

    Over a mesh that only replicates, the chunk is the whole. Leaves of the same dtype alias it, and nothing
    is gathered.

    Behind the chunks lies one number per parameter. There the ranks note the used parameters, in the
    reduction itself, so that all get the same gradients, or None.

    Args:
        slots: The original parameters; their data are copied and then given up.
        communicator: Allocates the shard and knows the rank.
        mesh: The ranks over which parameters are sharded and replicated.
        dims: For each parameter, the dimension that is cut.
        name: Name of the segment within its unit.
        offload: Whether the shard lives in host memory.
        pin: Whether that memory is pinned.
        alignment: The alignment that the chunks have; this layout does not move them.
    """

    extents: Sequence[Cut]

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        *,
        mesh: DataMesh,
        dims: Sequence[int],
        name: str,
        offload: bool,
        pin: bool,
        alignment: ShardAlignment | None = None,
    ) -> None:
        super().__init__(name, slots, communicator, offload, pin, mesh.part_of)
        self.in_place, self.sharded, self.alignment = self._ranks == 1, mesh.shards, alignment
        self.packs_rows = self.distributed is None  # else sums over other meshes may follow
        cuts = cut_all(slots, dims, self._ranks)
        end = cuts[-1].end
        self._used, self.noted_numel = slice(end, end + len(slots)), len(slots)
        self._offsets = [cut.offset for cut in cuts]
        self._shapes = [cut.shape_of(cut.rows(self._rank)) for cut in cuts]
        self._strides = [torch.empty(shape, device="meta").stride() for shape in self._shapes]
        self._lay_out(cuts, self._used.stop)
        if not self.in_place:
            self.full_numel = round_up(cuts[-1].stop, self._ranks)
        self._grad_dtype: torch.dtype | None = None
        self._placed = [
            (*mesh.placed(part, cut.dim), _whole(cut, part)) for cut, part in zip(cuts, self._parts)
        ]
        self._take_over(slots)

    def _own_part(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        cut = self.extents[index]
        return tensor.narrow(cut.dim, cut.first_row(self._rank), cut.rows(self._rank))

    def _adopt(self, shard: torch.Tensor) -> None:
        self._shard, self.dtype, self._pieces = shard, shard.dtype, self.cut(shard)
        resides = not self.sharded and not self.offloaded and not shard.is_meta
        self.resident = shard.data if resides else None
        self.flat_param = nn.Parameter(shard, requires_grad=False)
        self._specs = self._specs_in(self.dtype)
        self._grad_specs = self._specs if self._grad_dtype is None else self._specs_in(self._grad_dtype)

    def _specs_in(self, dtype: torch.dtype) -> list[DTensorSpec]:
        return [
            DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))
            for mesh, placements, (shape, stride) in self._placed
        ]

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        shards = map(dtensor_of, self._pieces, self._specs)
        self.sources = self.sharded_params = [
            nn.Parameter(shard, requires_grad=param.requires_grad) for shard, param in zip(shards, originals)
        ]
        self._updated = [True] * len(self.sources)
        self._show_pieces()

    def _show_pieces(self) -> None:
        """Binds the sharded parameters, which conversions change, to the pieces of the shard."""
        this = weakref.ref(self)
        for index, (param, piece) in enumerate(zip(self.sources, self._pieces)):
            param._local_tensor = piece  # type: ignore[attr-defined]  # not another alias of it
            param.__dict__.update(self._attributes[index])
            mark_owned(param)
            part = self._parts[index]
            param.redistribute = Redistribution(this, index, part)  # type: ignore[attr-defined]
            if self._grad_dtype is not None:
                _set_grad_dtype(param, self._grad_dtype)

    def sharded_param(self, index: int) -> nn.Parameter:
        """Returns the sharded parameter of an index."""
        return self.sources[index]

    def graph_leaf(self, index: int) -> nn.Parameter | None:
        """Returns the leaf that takes a parameter's gradients; None while the unit is in no schedule."""
        owner = self.owner
        return self.leaves[index] if owner is not None and owner.prepare_leaves() else None

    # contents

    def written(self) -> Written:
        sources = self.sources  # the shard's version counts writes to the pieces themselves
        return [*map(_VERSION, sources), self._shard._version], [*map(_DATA_PTR, map(_LOCAL, sources))]

    def intervals(self) -> list[Interval]:
        return [
            Interval(cut.fqn, source.shape, first, piece.view(-1), source, first, part=part)
            for cut, piece, source, part in zip(self.extents, self._pieces, self.sources, self._parts)
            for first in [only_rows(cut).first_row(self._rank) * cut.shape[1:].numel()]
        ]

    def held_by_rank(self) -> list[list[int]]:
        return [
            [only_rows(cut).rows(rank) * cut.shape[1:].numel() for rank in range(self._ranks)]
            for cut in self.extents
        ]

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        starts = map(operator.add, repeat(shard.storage_offset()), self._offsets)
        return [*map(torch.Tensor.as_strided, repeat(shard), self._shapes, self._strides, starts)]

    # buffers

    def parts(self, gathered: torch.Tensor) -> list[list[torch.Tensor]]:
        parts = gathered.view(self._ranks, -1)
        return [cut.boxes(parts) for cut in self.extents]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.extents[index].split(tensor)

    def packer(self, gathered: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        parts = gathered.view(self._ranks, -1)
        by_boxes = _BoxPacker(self.extents, self._used, parts)
        # In one call, for parameters with the same number of rows on every rank; else it would pad.
        fills = all(cut.folded is not None and cut.whole == self._ranks for cut in self.extents)
        if fills and (gathered.is_contiguous() or gathered.is_cpu):
            return _RowPacker(self.extents, self._used, parts, by_boxes)
        return by_boxes

    def padding(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        return _padding(self.extents, gathered.view(self._ranks, -1))

    # gradients

    def notes(self, gathered: torch.Tensor) -> torch.Tensor:
        return gathered.view(self._ranks, -1)[:, self._used]

    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        notes.fill_(1)
        for index, mine in enumerate(used):
            if not mine:
                notes[..., index].zero_()

    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        self.note_used(shard[self._used], used)

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool], frozen: bool) -> Sequence[bool]:
        unknown = [(frozen or param.requires_grad) and not mine for param, mine in zip(self.sources, used)]
        if not any(unknown):
            return used
        # The host waits for the device to look at numbers: once, and only where it must.
        notes = shard[self._used].tolist()
        return [mine or (ask and note != 0) for mine, ask, note in zip(used, unknown, notes)]

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        self._grad_dtype, self._grad_specs = dtype, self._specs_in(dtype)
        for param in self.sources:
            _set_grad_dtype(param, dtype)

    # changes by users, and copies

    def follow_replaced(self) -> bool:
        """Takes over parameters that were converted, loaded with `assign=True`, or left the meta device."""
        shown = [*map(dict.get, *self.display.firsts)]  # on every step: no call
        same = all(map(operator.is_, shown, self.sources))
        if same and all(map(operator.is_, map(_LOCAL, self.sources), self._pieces)):
            return False
        params = [param for param in shown if param is not None]
        if len(params) < len(shown):
            return False  # removed parameters are refused elsewhere
        for cut, spec, param in zip(self.extents, self._specs, params):
            _check_replaced(cut, spec, param, params[0], self._rank)
        self._take_values(params)
        for cut, before, now in zip(self.extents, self.sources, params):
            if before is not now:  # an optimizer that was made earlier would train nothing
                refuse_in_steps(before, partial(_why_left, self.name_of, cut.fqn))
        self.sources = self.sharded_params = params
        self._show_pieces()
        self._follow_places()
        self.display.show_sharded()  # tied places may have got different parameters
        return True

    def _take_values(self, params: Sequence[nn.Parameter]) -> None:
        """Takes over the values of other sharded parameters."""
        values = [to_local(param.detach()) for param in params]
        self._adopt(self._new_shard(values[0]))
        for piece, value in zip(self._pieces, values):
            piece.copy_(value)


def _why_left(name_of: Callable[[str], str], fqn: str) -> str:
    return (
        f"holds the parameter '{name_of(fqn)}' as it was before another took its place (on rank "
        f"{dist.get_rank()}), by load_state_dict(assign=True), say: training no longer reaches it. Make the "
        "optimizer after that, or load without assign"
    )


def _whole(cut: Cut, part: LocalPart | None) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns shape and stride of the parameter that the optimizer sees."""
    if part is not None:
        return part.shape, part.stride
    return cut.shape, torch.empty(cut.shape, device="meta").stride()


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype)


def _check_replaced(cut: Cut, spec: DTensorSpec, param: nn.Parameter, first: nn.Parameter, rank: int) -> None:
    fits = isinstance(param, DTensor) and param.shape == spec.shape and param.placements == spec.placements
    same_kind = param.dtype == first.dtype and param.is_meta == first.is_meta
    if not fits or not same_kind or param._local_tensor.shape[cut.dim] != cut.rows(rank):  # type: ignore[attr-defined]
        raise ValueError(
            f"the sharded parameter '{cut.fqn}' was replaced by a {type(param).__name__} of shape "
            f"{tuple(param.shape)}, dtype {param.dtype} on {param.device}; it must stay a DTensor of shape "
            f"{tuple(spec.shape)}, with placements {spec.placements}, and of one dtype with the unit's others"
        )
