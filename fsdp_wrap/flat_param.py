"""`FlatParameter` and the layout that concatenates parameters and cuts the result into even shards."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._buffers import Stretches
from fsdp_wrap._flat_front import FlatFront, Front, SliceFront
from fsdp_wrap._gradient_hooks import HOOKS_OF, run_gradient_hooks
from fsdp_wrap._gradient_mark import GradientMarks
from fsdp_wrap._interval import Interval
from fsdp_wrap._modules import Display, ParamPlaces, ParamSlot, Place, show_extra
from fsdp_wrap._shown import Cover, Shown
from fsdp_wrap._torch_private import foreach_copy_, foreach_zero_, make_subclass
from fsdp_wrap._use_notes import UseNotes

__all__ = ["FlatLayout", "FlatParameter"]

_REQUIRES_GRAD, _VERSION = attrgetter("requires_grad"), attrgetter("_version")

_ALIGNMENT_BYTES = 16
"""Start of every parameter in the buffer: matrix kernels round differently on less aligned weights."""


class FlatParameter(nn.Parameter):
    """This rank's shard of the concatenated parameters of one segment; what an optimizer updates.

    It takes no part in autograd: modules compute with leaves, and `.grad` is filled by the reduction.

    Attributes:
        _fqns: Names of the original parameters within the unit, in order.
        _shapes: Their shapes.
        _numels: Their element counts.
        of_layout: The layout whose shard it is, if any; there `_internals.py` reads what torch's have.
        shard_alias: Another tensor of the same data, once it was asked for.
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    of_layout: LayoutRef | None = None
    shard_alias: torch.Tensor | None = None
    _fsdp_flattened = True  # by which clients know sharded parameters
    _is_flat_param = True  # by which torch knows its own

    def __new__(cls, data: torch.Tensor, requires_grad: bool, extents: Sequence[Extent]) -> FlatParameter:
        self: FlatParameter = make_subclass(cls, data, requires_grad)
        self._fqns = tuple(extent.fqn for extent in extents)
        self._shapes = tuple(extent.shape for extent in extents)
        self._numels = tuple(extent.shape.numel() for extent in extents)
        return self

    def register_hook(self, hook: Any) -> Any:
        """Refuses what autograd would call with the gradient before it is accumulated: it never does."""
        raise ValueError(
            f"register_hook on the FlatParameter of '{self._fqns[0]}' and others would never be called, "
            "since gradients come from a reduction: use register_post_accumulate_grad_hook, or hook the "
            "module's parameters inside its forward"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        extents = [Extent(fqn, shape, 0, 0) for fqn, shape in zip(self._fqns, self._shapes)]
        copied = FlatParameter(self.detach().clone(), self.requires_grad, extents)
        memo[id(self)] = copied
        return copied


@dataclass(frozen=True)
class Extent:
    """Where one original parameter lies in the unsharded buffer: [start, stop)."""

    fqn: str
    shape: torch.Size
    start: int
    stop: int

    def within(self, first: int, length: int) -> tuple[int, int]:
        """Returns the part (start, stop) that lies in [first, first + length), relative to `first`.

        Both are equal where nothing does.
        """
        start = min(max(self.start - first, 0), length)
        return start, max(start, min(self.stop - first, length))


class Allocator(Protocol):
    """What a layout needs of a communicator."""

    rank: int
    size: int

    device: torch.device

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool = True) -> torch.Tensor: ...


class LayoutRef(weakref.ref["FlatLayout"]):
    """Of a `FlatParameter` to its layout; where that is pickled, it is left out."""

    def __reduce__(self) -> Any:
        return type(None), ()


class HiddenFlatParameter(FlatParameter):
    """One that no optimizer sees, but its slices or another: their gradients are its own."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the shard, of which those of slices are views; zeros where a slice has none."""
        layout = None if self.of_layout is None else self.of_layout()
        return None if layout is None else layout.joint_gradient()

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        layout = None if self.of_layout is None else self.of_layout()
        if layout is not None:
            layout.read_gradient(grad, [grad is not None] * len(layout.places))


class FlatLayout:
    """Parameters of one dtype side by side in one buffer, cut into one even shard per rank.

    Attributes:
        first: Where this rank's shard begins in the unsharded buffer.
        extents: Where the original parameters lie there.
        module: The unit's module.
        leaves: The leaves that were made last.

    Args:
        slots: The original parameters; their data are copied and then given up.
        allocator: Allocates the shard and knows the rank.
        name: Name of the `FlatParameter` in the unit's module.
        module: The unit's module.
        sharded: Whether the buffer is cut at all; otherwise every rank holds the whole of it as its shard.
        offload: Whether the shard lives in host memory.
        use_orig_params: Whether the optimizer sees 1-D slices of the original parameters (the user's
            own Parameter objects) or the `FlatParameter`.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        allocator: Allocator,
        *,
        name: str,
        module: nn.Module,
        sharded: bool,
        offload: bool,
        use_orig_params: bool,
    ) -> None:
        first = slots[0].param
        self.dtype = first.dtype
        self.places: Sequence[ParamPlaces] = [slot.places for slot in slots]
        self.module, self._name, self.sharded, self.in_place = module, name, sharded, True
        self.extents = _extents(slots, max(1, _ALIGNMENT_BYTES // first.element_size()))
        self.shard_numel = max(1, -(-self.extents[-1].stop // allocator.size))
        self.numel = self.full_numel = self.shard_numel * allocator.size
        self.noted_numel = 0
        self.average_hook: Callable[[torch.Tensor], None] | None = None
        self.first = self.shard_numel * allocator.rank
        self._allocate = allocator.empty_on_host if offload else allocator.empty
        shard = self._allocate(self.shard_numel, self.dtype)
        self._resides = not sharded and shard.device == allocator.device
        held = (extent.within(self.first, self.shard_numel) for extent in self.extents)
        self._held = Stretches(held, self.shard_numel)
        _fill(shard, self.first, self.extents, slots)
        self._shard = shard
        kind = HiddenFlatParameter if use_orig_params else FlatParameter
        self.flat_param = kind(shard, first.requires_grad, self.extents)
        self.flat_param.of_layout = LayoutRef(self)
        self._attributes = [dict(slot.param.__dict__) for slot in slots]
        self.leaves: list[nn.Parameter] = []
        self._front: Front = SliceFront(self, slots) if use_orig_params else FlatFront(self)
        self._front.hide_full()
        bounds = [(extent.start, extent.stop) for extent in self.extents]
        self._use_notes = UseNotes(bounds, self.shard_numel, allocator, together=not use_orig_params)
        self.note_used, self.note_in_shard = self._use_notes.write, self._use_notes.write_in_shard
        for slot, piece in zip(slots, self.pieces(self.flat_param.data)):
            slot.param.data = piece  # whoever holds the original does not keep its memory alive
        self._marks = GradientMarks()

    @property
    def name(self) -> str:
        return self._name

    @property
    def resident(self) -> torch.Tensor | None:
        return self.flat_param.data if self._resides else None

    @property
    def sources(self) -> Sequence[nn.Parameter]:
        return self._front.sources

    @property
    def trains(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self._front.sources)]

    @property
    def fqns(self) -> Sequence[str]:
        return self.flat_param._fqns

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[extent.start : extent.stop].view(extent.shape) for extent in self.extents]

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[view] for view in self.views(travelling)]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def packer(self, travelling: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        views, gaps = self.views(travelling), self.padding(travelling)

        def pack(tensors: list[torch.Tensor]) -> None:
            foreach_copy_(views, tensors)
            if gaps:
                foreach_zero_(gaps)

        return pack

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        stops = [0, *(extent.stop for extent in self.extents)]
        starts = [*(extent.start for extent in self.extents), self.numel]
        return [travelling[stop:start] for stop, start in zip(stops, starts) if start > stop]

    def notes(self, travelling: torch.Tensor) -> torch.Tensor:
        return travelling

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool]) -> Sequence[bool]:
        return self._use_notes.read(shard, used, self.trains)

    @property
    def without_values(self) -> Sequence[str]:
        return ()

    @property
    def version(self) -> int:
        version: int = self.flat_param._version + sum(map(_VERSION, self._front.sources))
        return version

    @property
    def shown_sharded(self) -> Shown:
        return self._front.shown

    def written(self) -> tuple[list[int], list[int]]:
        sources = self._front.sources
        return [*map(_VERSION, sources)], [*map(torch.Tensor.data_ptr, sources)]

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        leaves = []
        for view, attributes in zip(self.views(buffer), self._attributes):
            leaf = nn.Parameter(view.data, requires_grad=False)  # with a version counter of its own
            leaf.__dict__.update(attributes)
            leaves.append(leaf)
        self.leaves = leaves
        self._show_leaves_in_places()
        return leaves

    def _show_leaves_in_places(self) -> None:
        self.show_leaves = Display(self.places, self.leaves, self._front.plain).show
        self.cover = Cover(self.places, self.leaves)

    def write_shard(self, out: torch.Tensor) -> None:
        shard = self.flat_param.data
        if not self._resides or out.data_ptr() != shard.data_ptr():
            out.copy_(shard, non_blocking=True)

    def read_shard(self, own: torch.Tensor) -> None:
        self.flat_param.data.copy_(own.data)

    def show(self, params: Sequence[torch.Tensor]) -> None:
        Display(self.places, params, self._front.plain).show()

    def show_sharded(self) -> None:
        self._front.show_sharded()

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        self._front.show_full(params, copies)

    def hide_full(self) -> None:
        self._front.hide_full()

    def shown(self) -> list[nn.Parameter | None]:
        return [places.shown() for places in self.places]

    def shapes(self) -> dict[Place, torch.Size]:
        return {place: extent.shape for places, extent in zip(self.places, self.extents) for place in places}

    def add_place(self, index: int, place: Place) -> None:
        self.places[index].add(*place)
        self._follow_places()
        self._front.show_sharded()

    def _follow_places(self) -> None:
        self._show_leaves_in_places()
        self._front.follow_places()

    def register_flat_param(self, param: nn.Parameter | None) -> None:
        """Registers the `FlatParameter` with the unit's module, or takes it away."""
        show_extra(self.module, self._name, param)

    def add_reduced(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        self._marks.take_away()
        self._front.add(reduced.to(self.flat_param.device), used)
        if any(map(HOOKS_OF, self._front.holders)):
            run_gradient_hooks(self.sources, used)

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        for param in self._front.holders:
            param.grad_dtype = None

    def mark_unsynced(self) -> None:
        self._marks.put(self._front.holders)

    def zeroed(self) -> list[bool]:
        return self._marks.zeroed(self.sources)

    def write_gradient(self, out: torch.Tensor) -> None:
        out.zero_()
        for param, piece in zip(self._front.holders, self._front.cut(out)):
            if param.grad is not None:
                piece.copy_(param.grad)

    def read_gradient(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        pieces = [None] * len(self._front.holders) if own is None else self._front.cut(own)
        for param, piece, has_grad in zip(self._front.holders, pieces, self._front.used(present)):
            _set_gradient(param, piece if has_grad else None)

    def gradients(self) -> list[torch.Tensor | None]:
        return self._front.gradients()

    def joint_gradient(self) -> torch.Tensor | None:
        """Returns the gradient shard, of which the holders' gradients are views; None where none has one.

        While gradients wait for a reduction, or parameters are shown in full, it may be a copy.
        """
        return self._front.joint_gradient(moves=not self._marks.present)

    def gradient_blocks(self) -> list[torch.Tensor]:
        return self._front.gradient_blocks()

    def follow_replaced(self) -> bool:
        old, moved = self._shard, self.flat_param.data_ptr() != self._shard.data_ptr()
        new = self.flat_param.data if moved else self._front.replaced(old)
        if new is old:
            return False
        if new.shape != old.shape:
            raise ValueError(
                f"the data of the FlatParameter of '{self.fqns[0]}' and others were replaced by a tensor of "
                f"shape {tuple(new.shape)}; they must keep {tuple(old.shape)}"
            )
        self._shard, self.dtype = new, new.dtype
        self.flat_param.data = new
        self._front.move_to(new)
        return True

    def copied(self, memo: dict[int, Any]) -> FlatLayout:
        new = copy.copy(self)
        new._shard = self._allocate(self.shard_numel, self.dtype).copy_(self.flat_param.data)
        kind = type(self.flat_param)
        new.flat_param = kind(new._shard, self.flat_param.requires_grad, self.extents)
        new.flat_param.__dict__.update(self.flat_param.__dict__)
        new.flat_param.of_layout, new.flat_param.shard_alias = LayoutRef(new), None
        new._front = self._front.copied(new, memo)
        new._marks = GradientMarks()
        memo[id(self.flat_param)] = new.flat_param
        return new

    def follow_modules(self, memo: dict[int, Any]) -> None:
        self.places = copy.deepcopy(self.places, memo)
        self.module = copy.deepcopy(self.module, memo)
        self._follow_places()
        self._front.hide_full()

    def intervals(self) -> list[Interval]:
        result = []
        for extent, source in zip(self.extents, self.sources):
            start, stop = extent.within(self.first, self.shard_numel)
            first = self.first + start - extent.start if stop > start else 0
            offset = start if source is self.flat_param else 0
            data = self.flat_param.data[start:stop]
            result.append(Interval(extent.fqn, extent.shape, first, data, source, offset, extent.start))
        return result

    def held_by_rank(self) -> list[list[int]]:
        firsts = range(0, self.numel, self.shard_numel)
        bounds = ([extent.within(first, self.shard_numel) for first in firsts] for extent in self.extents)
        return [[stop - start for start, stop in ranks] for ranks in bounds]

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a shard into this rank's pieces of the original parameters: 1-D, or whole if not sharded."""
        return self._held.of(shard) if self.sharded else self.views(shard)


def _set_gradient(param: nn.Parameter, piece: torch.Tensor | None) -> None:
    if piece is None or piece.numel() == 0:
        param.grad = None
    elif param.grad is None:
        param.grad = piece.to(param.device, copy=True)
    elif not torch.equal(param.grad, piece.to(param.grad)):
        param.grad.copy_(piece)


def _extents(slots: Sequence[ParamSlot], alignment: int) -> list[Extent]:
    result: list[Extent] = []
    start = 0
    for slot in slots:
        stop = start + slot.param.numel()
        result.append(Extent(slot.fqn, slot.param.shape, start, stop))
        start = -(-stop // alignment) * alignment
    return result


def _fill(shard: torch.Tensor, first: int, extents: Sequence[Extent], slots: Sequence[ParamSlot]) -> None:
    shard.zero_()
    for extent, slot in zip(extents, slots):
        start, stop = extent.within(first, shard.numel())
        if stop > start:
            offset = first + start - extent.start
            shard[start:stop].copy_(slot.param.detach().reshape(-1)[offset : offset + stop - start])
