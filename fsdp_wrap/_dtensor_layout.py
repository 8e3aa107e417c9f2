"""`DTensorLayout`: parameters that are cut one by one along a dimension, and shown as `DTensor`s."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_wrap._buffers import Stretches
from fsdp_wrap._cut import Cut, cut_all, only_rows, round_up
from fsdp_wrap._gradient_hooks import HOOKS_OF, run_gradient_hooks
from fsdp_wrap._gradient_mark import GradientMarks, held_by_this_rank
from fsdp_wrap._interval import Interval
from fsdp_wrap._modules import Display, ParamPlaces, ParamSlot, Place, mark_owned
from fsdp_wrap._shown import Cover, Shown
from fsdp_wrap._torch_private import DTensorSpec, TensorMeta, chunk_cat, foreach_copy_, foreach_zero_
from fsdp_wrap.flat_param import Allocator

__all__ = ["DTensorLayout"]

_ALIGNMENT_BYTES = 16
# The public way costs ten times as much, per gradient and step, and __init__, which does nothing, some.
_dtensor: Callable[[torch.Tensor, DTensorSpec], DTensor]
_dtensor = functools.partial(DTensor.__new__, DTensor, requires_grad=False)
_LOCAL, _REQUIRES_GRAD = operator.attrgetter("_local_tensor"), operator.attrgetter("requires_grad")
_VERSION, _LOCAL_VERSION = operator.attrgetter("_version"), operator.attrgetter("_local_tensor._version")
_DTYPE = operator.attrgetter("dtype")


class DTensorLayout:
    """Parameters of one dtype, each cut into one chunk per rank; a rank's chunks stand side by side.

    Behind the chunks stands one number per parameter, by which the ranks tell each other, in the reduction
    itself, whose gradients they have contributed to: all ranks get the same gradients, or None.

    Args:
        slots: The original parameters; their data are copied and then given up.
        allocator: Allocates the shard and knows the rank.
        mesh: Of the sharded parameters; the last dimension is that of the shards.
        dims: For each parameter, the dimension that is cut.
        name: Name of the segment within its unit.
        offload: Whether the shard lives in host memory.
        pin: Whether that is pinned.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        allocator: Allocator,
        *,
        mesh: DeviceMesh,
        dims: Sequence[int],
        name: str,
        offload: bool,
        pin: bool,
    ) -> None:
        first = slots[0].param
        self.name, self.sharded, self.in_place = name, True, allocator.size == 1
        self.places: Sequence[ParamPlaces] = [slot.places for slot in slots]
        self._mesh, self._rank, self._ranks = mesh, allocator.rank, allocator.size
        self._cuts = cut_all(slots, dims, allocator.size, max(1, _ALIGNMENT_BYTES // first.element_size()))
        self._used = slice(self._cuts[-1].end, self._cuts[-1].end + len(self._cuts))
        # Tensors of the wanted shapes: a view like one costs half of a view by a tuple of numbers.
        self._chunk_likes = [torch.empty(cut.held_shape(self._rank), device="meta") for cut in self._cuts]
        self.shard_numel, self.noted_numel = self._used.stop, len(self._cuts)
        ends = (cut.offset + like.numel() for cut, like in zip(self._cuts, self._chunk_likes))
        starts = (cut.offset for cut in self._cuts)
        self._chunks = Stretches(zip(starts, ends), self.shard_numel)
        self.numel = self.shard_numel * allocator.size
        self.full_numel = self.numel if self.in_place else round_up(self._cuts[-1].stop, allocator.size)
        self._allocate = functools.partial(allocator.empty_on_host, pin=pin) if offload else allocator.empty
        self._attributes = [dict(slot.param.__dict__) for slot in slots]
        self._marks = GradientMarks()
        self.average_hook: Callable[[torch.Tensor], None] | None = None
        self._grad_dtype: torch.dtype | None = None
        self._adopt_shard(self._new_shard(first.dtype, first.is_meta))
        for cut, slot, piece in zip(self._cuts, slots, self._pieces):
            piece.copy_(slot.param.detach().narrow(cut.dim, cut.first_row(self._rank), cut.rows(self._rank)))
            slot.param.data = piece  # whoever holds the original does not keep its memory alive
        self.sources = [self._parameter(index, slot.param) for index, slot in enumerate(slots)]
        self._leaves: list[nn.Parameter] = []
        self._follow_places()

    def _new_shard(self, dtype: torch.dtype, on_meta: bool) -> torch.Tensor:
        if on_meta:
            return torch.empty(self.shard_numel, dtype=dtype, device="meta")
        return self._allocate(self.shard_numel, dtype).zero_()

    def _adopt_shard(self, shard: torch.Tensor) -> None:
        self._shard, self.dtype = shard, shard.dtype
        self._pieces = self._held(shard)
        shard_on = [Shard(cut.dim) for cut in self._cuts]
        over_replicas = [Replicate()] * (self._mesh.ndim - 1)
        self._specs = [
            DTensorSpec(
                self._mesh,
                (*over_replicas, placement),
                TensorMeta(cut.shape, torch.empty(cut.shape, device="meta").stride(), self.dtype),
            )
            for cut, placement in zip(self._cuts, shard_on)
        ]
        self._grad_specs = [*map(self._grad_spec, self._specs)]

    def _grad_spec(self, spec: DTensorSpec) -> DTensorSpec:
        if self._grad_dtype is None or self._grad_dtype == self.dtype:
            return spec
        assert spec.tensor_meta is not None
        return DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta._replace(dtype=self._grad_dtype))

    def _held(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's part, or something of its size, in which its rows are."""
        chunks = zip(self._chunks.of(part), self._chunk_likes)
        return [chunk if like.ndim == 1 else chunk.view_as(like) for chunk, like in chunks]

    def _parameter(self, index: int, like: nn.Parameter) -> nn.Parameter:
        shard = _dtensor(self._pieces[index], self._specs[index])
        param = nn.Parameter(shard, requires_grad=like.requires_grad)
        self._show_in(param, index)
        return param

    def _show_in(self, param: nn.Parameter, index: int) -> None:
        param._local_tensor = self._pieces[index]  # type: ignore[attr-defined]  # not another alias of it
        param.__dict__.update(self._attributes[index])  # conversions exchange them
        mark_owned(param)
        if self._grad_dtype is not None:  # conversions forget it
            _set_grad_dtype(param, self._grad_dtype)

    # what there is

    @property
    def trains(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self.sources)]

    @property
    def fqns(self) -> Sequence[str]:
        return [cut.fqn for cut in self._cuts]

    @property
    def flat_param(self) -> nn.Parameter:
        return nn.Parameter(self._shard, requires_grad=False)

    @property
    def resident(self) -> torch.Tensor | None:
        return None

    @property
    def without_values(self) -> Sequence[str]:
        return self.fqns if self._shard.is_meta else ()

    @property
    def version(self) -> int:
        version: int = sum(map(_VERSION, self.sources)) + sum(map(_LOCAL_VERSION, self.sources))
        return version

    def written(self) -> tuple[list[int], list[int]]:
        held = [*map(_LOCAL, self.sources)]
        versions = map(operator.add, map(_VERSION, self.sources), map(_VERSION, held))
        return [*versions], [*map(torch.Tensor.data_ptr, held)]

    def shapes(self) -> dict[Place, torch.Size]:
        return {place: cut.shape for places, cut in zip(self.places, self._cuts) for place in places}

    def intervals(self) -> list[Interval]:
        return [
            Interval(cut.fqn, cut.shape, first, piece.view(-1), source, first)
            for cut, piece, source in zip(self._cuts, self._pieces, self.sources)
            for first in [only_rows(cut).first_row(self._rank) * cut.shape[1:].numel()]
        ]

    def held_by_rank(self) -> list[list[int]]:
        return [
            [only_rows(cut).rows(rank) * cut.shape[1:].numel() for rank in range(self._ranks)]
            for cut in self._cuts
        ]

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        return [piece.reshape(-1) for piece in self._held(shard)]

    # buffers

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[cut.start : cut.stop].view(cut.shape) for cut in self._cuts]

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        parts = travelling.view(self._ranks, -1)
        return [cut.boxes(parts) for cut in self._cuts]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._cuts[index].split(tensor)

    def packer(self, travelling: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        # Tensors of the wanted shapes, as above.
        folds = [torch.empty(cut.folded, device="meta") for cut in self._cuts if cut.folded is not None]
        boxes, gaps = [box for boxes in self.parts(travelling) for box in boxes], self.padding(travelling)

        def pack(tensors: list[torch.Tensor]) -> None:
            if len(folds) == len(tensors):
                views = [*map(torch.Tensor.view_as, tensors, folds)]
            else:
                views = [view for cut, tensor in zip(self._cuts, tensors) for view in cut.split(tensor)]
            foreach_copy_(boxes, views)
            if gaps:
                foreach_zero_(gaps)

        if len(folds) == len(self._cuts) and all(cut.whole == self._ranks for cut in self._cuts):
            return self._row_packer(travelling.view(self._ranks, -1), pack)
        return pack

    def _row_packer(
        self, parts: torch.Tensor, otherwise: Callable[[list[torch.Tensor]], object]
    ) -> Callable[[list[torch.Tensor]], object]:
        """Returns a packer, for parameters of which every rank has as many rows, in one call.

        Args:
            parts: Of each rank, of the buffer that travels.
            otherwise: Packs tensors of another dtype.
        """
        starts = [*(cut.offset for cut in self._cuts[1:]), self._used.start]
        gaps = [start - cut.end for cut, start in zip(self._cuts, starts)]
        zeros, notes = parts.new_zeros(self._ranks * max(gaps)), torch.ones_like(parts[:, self._used])
        between = [[zeros[: self._ranks * gap].view(self._ranks, gap)] if gap else [] for gap in gaps]
        between[-1].append(notes)  # the rest of a part, which `note_used` writes
        alike = {parts.dtype}

        def pack(tensors: list[torch.Tensor]) -> None:
            if {*map(_DTYPE, tensors)} != alike:
                otherwise(tensors)
                return
            pieces = [each for tensor, gap in zip(tensors, between) for each in (tensor, *gap)]
            chunk_cat(pieces, 0, self._ranks, out=parts)

        return pack

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        parts = travelling.view(self._ranks, -1)
        gaps = [parts[:, one.end : other.offset] for one, other in zip(self._cuts, self._cuts[1:])]
        gaps += [gap for cut in self._cuts for gap in cut.padding(parts)]
        return [gap for gap in gaps if gap.numel()]

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        # Each with a version counter of its own.
        leaves = [nn.Parameter(view.data, requires_grad=False) for view in self.views(buffer)]
        for leaf, attributes in zip(leaves, self._attributes):
            leaf.__dict__.update(attributes)
        self._leaves = leaves
        self._follow_places()
        return leaves

    def write_shard(self, out: torch.Tensor) -> None:
        out.copy_(self._shard, non_blocking=True)

    def read_shard(self, own: torch.Tensor) -> None:
        self._shard.copy_(own.detach())

    # what the modules show

    def show(self, params: Sequence[torch.Tensor]) -> None:
        Display(self.places, params).show()

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        self.show(params)

    def hide_full(self) -> None:
        self.show_sharded()

    def shown(self) -> list[nn.Parameter | None]:
        return [shown.get(name) for shown, name in self._first_places]

    def add_place(self, index: int, place: Place) -> None:
        self.places[index].add(*place)
        self._follow_places()
        self.show_sharded()

    # gradients

    def notes(self, travelling: torch.Tensor) -> torch.Tensor:
        return travelling.view(self._ranks, -1)[:, self._used]

    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        if all(used):
            notes.fill_(1)
        else:
            notes.copy_(torch.tensor(used, dtype=notes.dtype), non_blocking=True)

    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        self.note_used(shard[self._used], used)

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool]) -> Sequence[bool]:
        # Looking at a number waits for the device: only where this rank does not know by itself.
        notes = shard[self._used]
        return [
            mine or (param.requires_grad and notes[index].item() != 0)
            for index, (param, mine) in enumerate(zip(self.sources, used))
        ]

    def add_reduced(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        self._marks.take_away()
        own = reduced.to(self._shard.device)
        for param, piece, spec, by_any in zip(self.sources, self._held(own), self._grad_specs, used):
            if not by_any or not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = _dtensor(piece, spec)
            else:
                held_by_this_rank(param.grad).add_(piece)
        if any(map(HOOKS_OF, self.sources)):
            run_gradient_hooks(self.sources, used)

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        self._grad_dtype = dtype
        self._grad_specs = [*map(self._grad_spec, self._specs)]
        for param in self.sources:
            _set_grad_dtype(param, dtype)

    def mark_unsynced(self) -> None:
        self._marks.put(self.sources)

    def zeroed(self) -> list[bool]:
        return self._marks.zeroed(self.sources)

    def write_gradient(self, out: torch.Tensor) -> None:
        out.zero_()
        for param, piece in zip(self.sources, self._held(out)):
            if param.grad is not None:
                piece.copy_(held_by_this_rank(param.grad))

    def read_gradient(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        pieces = [None] * len(self.sources) if own is None else self._held(own)
        for index, (param, piece, has_grad) in enumerate(zip(self.sources, pieces, present)):
            if piece is None or not has_grad:
                param.grad = None
            elif param.grad is None:
                dtype = self._grad_dtype or piece.dtype
                own_piece = piece.to(self._shard.device, dtype, copy=True)
                param.grad = _dtensor(own_piece, self._grad_specs[index])
            elif not torch.equal(held_by_this_rank(param.grad), piece.to(self._shard)):
                held_by_this_rank(param.grad).copy_(piece)

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if param.grad is None else held_by_this_rank(param.grad) for param in self.sources]

    def gradient_blocks(self) -> list[torch.Tensor]:
        return [grad for grad in self.gradients() if grad is not None and grad.numel()]

    # changes from outside

    def follow_replaced(self) -> bool:
        """Takes over parameters that were converted, loaded with `assign=True`, or left the meta device."""
        shown = self.shown()
        same = all(map(operator.is_, shown, self.sources))
        if same and all(map(operator.is_, map(_LOCAL, self.sources), self._pieces)):
            return False
        found = [old if new is None else new for old, new in zip(self.sources, shown)]
        if all(map(_is_held_as, found, self.sources, self._pieces)):
            return False
        for cut, spec, param in zip(self._cuts, self._specs, found):
            _check_replaced(cut, spec, param, found[0], self._rank)
        values = [held_by_this_rank(param.detach()) for param in found]
        self._adopt_shard(self._new_shard(found[0].dtype, values[0].is_meta))
        for index, (param, value) in enumerate(zip(found, values)):
            self._pieces[index].copy_(value)
            self._show_in(param, index)
        self.sources = found
        self._follow_places()
        self.show_sharded()  # of tied ones each place may have got one of its own
        return True

    def copied(self, memo: dict[int, Any]) -> DTensorLayout:
        new = copy.copy(self)
        new._marks = GradientMarks()
        new._adopt_shard(self._new_shard(self.dtype, self._shard.is_meta).copy_(self._shard))
        new.sources = [new._parameter(index, source) for index, source in enumerate(self.sources)]
        memo.update((id(old), param) for old, param in zip(self.sources, new.sources))
        return new

    def follow_modules(self, memo: dict[int, Any]) -> None:
        self.places = copy.deepcopy(self.places, memo)
        self._follow_places()
        self.show_sharded()

    def _follow_places(self) -> None:
        firsts = [next(iter(places)) for places in self.places]
        self._first_places = [(module._parameters, name) for module, name in firsts]
        self.show_leaves = Display(self.places, self._leaves).show
        self.cover = Cover(self.places, self._leaves)
        self.show_sharded = Display(self.places, self.sources).show
        self.shown_sharded = Shown(self.places, self.sources)


def _set_grad_dtype(param: nn.Parameter, dtype: torch.dtype) -> None:
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype)


def _is_held_as(found: nn.Parameter, source: nn.Parameter, piece: torch.Tensor) -> bool:
    return found is source and held_by_this_rank(found) is piece


def _check_replaced(cut: Cut, spec: DTensorSpec, param: nn.Parameter, first: nn.Parameter, rank: int) -> None:
    fits = isinstance(param, DTensor) and param.shape == cut.shape and param.placements == spec.placements
    same_kind = param.dtype == first.dtype and param.is_meta == first.is_meta
    if not fits or not same_kind or param._local_tensor.shape[cut.dim] != cut.rows(rank):  # type: ignore[attr-defined]
        raise ValueError(
            f"the sharded parameter '{cut.fqn}' was replaced by a {type(param).__name__} of shape "
            f"{tuple(param.shape)}, dtype {param.dtype} on {param.device}; it must stay a DTensor of shape "
            f"{tuple(cut.shape)}, with placements {spec.placements}, and of one dtype with the unit's others"
        )
