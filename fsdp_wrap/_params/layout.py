"""`Layout`: how the original parameters of one segment lie in 1-D buffers, and what stands for them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Communicator, FromHost, ToHost, accelerator_of
from fsdp_wrap._core import (
    HOOKS_OF,
    ModuleWriter,
    ParamPlaces,
    ParamSlot,
    Place,
    ShardAlignment,
    run_gradient_hooks,
)
from fsdp_wrap._core.torch_private import foreach_copy_, foreach_zero_
from fsdp_wrap._params.parallel import LocalPart, local_parts, to_local
from fsdp_wrap._params.shown import Cover, Shown
from fsdp_wrap._params.zero_marks import GradientMarks

Written = tuple[list[int], list[int]]
"""How often tensors were written to, and where they lie."""

_VERSION, _DTYPE, _DATA_PTR = attrgetter("_version"), attrgetter("dtype"), torch.Tensor.data_ptr

_ALIGNMENT_BYTES = 16
"""Start of every parameter in a buffer: matrix kernels round differently on less aligned weights."""


def alignment_of(slots: Sequence[ParamSlot]) -> int:
    """Returns of how many elements the starts of parameters in a buffer must be multiples."""
    return max(1, _ALIGNMENT_BYTES // slots[0].param.element_size())


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Interval:
    """The contiguous piece of one flattened original parameter that a rank holds.

    Attributes:
        fqn: Name of the original parameter within its unit.
        shape: Its shape.
        start: Index of the piece's first element in the flattened parameter, or what `part` tells of it.
        data: The piece, 1-D, in master dtype; writing into it changes the sharded parameter.
        source: The sharded parameter that holds it.
        offset: Index of the piece's first element in the flattened `source`.
        at: Index of the parameter's first element in a buffer of which each rank has an even part; 0 where it
            is cut by itself.
        part: What ranks have between them, if that is a part of the parameter.
    """

    fqn: str
    shape: torch.Size
    start: int
    data: torch.Tensor
    source: nn.Parameter
    offset: int
    at: int = 0
    part: LocalPart | None = None

    @property
    def held_shape(self) -> torch.Size:
        """The shape of what ranks have between them."""
        return self.shape if self.part is None else self.part.held_shape

    def own(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the elements, 1-D, that the piece has of something of the parameter's shape."""
        held = full if self.part is None else self.part.cut(full)
        return held.reshape(-1)[self.start : self.stop]

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened parameter."""
        return self.start + self.data.numel()

    def within(self, like_source: torch.Tensor) -> torch.Tensor:
        """Returns the part of something of `source`'s shape (optimizer state, say) that belongs here."""
        return like_source.reshape(-1).narrow(0, self.offset, self.data.numel())


@dataclass(frozen=True)
class Extent:
    """Where one original parameter lies in the unsharded buffer: [start, stop).

    Attributes:
        fqn: Name within the unit.
        shape: Of the parameter.
        start: Index of its first element.
    """

    fqn: str
    shape: torch.Size
    start: int

    @functools.cached_property
    def stop(self) -> int:
        """Index after its last element."""
        return self.start + self.shape.numel()

    def within(self, first: int, length: int) -> tuple[int, int]:
        """Returns the part (start, stop) that lies in [first, first + length), relative to `first`.

        Both are equal where nothing does.
        """
        start = min(max(self.start - first, 0), length)
        return start, max(start, min(self.stop - first, length))


def memory_around(tensors: Sequence[torch.Tensor], starts: Sequence[int], numel: int) -> torch.Tensor | None:
    """Returns the one memory, 1-D, in which tensors begin at given elements; None if there is no such.

    Args:
        tensors: Not empty.
        starts: Where in that memory each of them begins; the first at 0.
        numel: Its size.
    """
    first = tensors[0]
    begin, size = first.data_ptr(), first.element_size()
    if [*map(_DATA_PTR, tensors)] != [begin + size * start for start in starts]:
        return None
    if {*map(_DTYPE, tensors)} != {first.dtype} or not all(map(torch.Tensor.is_contiguous, tensors)):
        return None
    if (first.storage_offset() + numel) * size > first.untyped_storage().nbytes():
        return None  # neighbours by chance
    return torch.as_strided(first.detach(), (numel,), (1,))


def stretches(bounds: Iterable[tuple[int, int]], length: int) -> tuple[list[int], list[int]]:
    """Tells how to cut a 1-D tensor in which pieces lie one after the other, perhaps with gaps.

    Args:
        bounds: The (start, stop) of each, in order; equal ones, wherever, for one that is empty.
        length: Of the tensor.

    Returns:
        The lengths of all that one call cuts it into, and which of these the pieces are.
    """
    sizes: list[int] = []
    indices: list[int] = []
    end = 0
    for start, stop in bounds:
        if stop > start > end:
            sizes.append(start - end)  # a gap
        indices.append(len(sizes) if stop > start else -1)
        if stop > start:
            sizes.append(stop - start)
            end = stop
    return [*sizes, length - end, 0], indices  # the last for all that are empty


class Layout(ABC):
    """The parameters of one segment: how they lie in buffers, what is shown of them, their gradients.

    The shards of all ranks, one after the other, are the buffer that travels. The leaves alias the unsharded
    buffer, which is the same where that is possible; else parameters are copied from one to the other.

    Args:
        name: Name of the segment within its unit.
        slots: The original parameters.
        communicator: Allocates the shard.
        offload: Whether the shard lives in host memory.
        pin: Whether that is pinned.
        own_dims: Dimensions of the mesh of distributed parameters over which units average gradients.

    Attributes:
        name: Name of the segment within its unit.
        fqns: Names of the original parameters within the unit.
        places: For each original parameter, every place that shows it.
        extents: Where the original parameters lie in the unsharded buffer.
        dtype: Master dtype.
        numel: Elements of the buffer that travels, padding included: `shard_numel` x ranks.
        full_numel: Elements of the unsharded buffer, padding included: a multiple of the ranks.
        in_place: Whether the buffer that travels is the unsharded one.
        shard_numel: Elements of this rank's part.
        offloaded: Whether the shard is in host memory, and gathers copy it to an accelerator.
        alignment: Where in a parameter the part of a rank may begin; None for anywhere.
        noted_numel: How many at the end of each part hold what `note_used` notes.
        sharded: Whether each rank has a part of its own; otherwise its part is the whole.
        leaves: The leaves that were made last.
        memory: What of them aliases the unsharded buffer: this rank's part where they are `DTensor`s.
        distributed: What of each original parameter is sharded, if that is a part; None where all are whole.
        flat_param: The parameter whose data are this rank's shard, whether or not the optimizer sees it.
        sources: For each leaf, the sharded parameter that stands for it.
        sharded_params: The sharded parameters, each once.
        show_leaves: Shows the leaves that were made last in the modules.
        show_sharded: Shows the sharded parameters in the modules.
        shown_sharded: What the modules show while they are sharded.
        cover: The leaves, to stand before the sharded parameters.
        extended: Whether tensor subclasses say what travels of the parameters, and make the leaves.
        resident: The unsharded buffer, where it is the shard itself and always in memory.
        average_hook: Called with this rank's part of each reduction once it is averaged, if there is one.
        prepare_leaves: Lets the leaves take gradients, once the unit is part of a schedule.
    """

    extents: Sequence[Extent]
    flat_param: nn.Parameter
    sources: Sequence[nn.Parameter]
    sharded_params: Sequence[nn.Parameter]
    in_place = sharded = True
    alignment: ShardAlignment | None = None
    extended = False
    noted_numel = 0
    resident: torch.Tensor | None = None
    dtype: torch.dtype
    _shard: torch.Tensor
    _pieces: list[torch.Tensor]
    _shows_plain = False  # whether plain tensors stand for the sharded parameters in the modules

    def __init__(
        self,
        name: str,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        offload: bool,
        pin: bool = True,
        own_dims: Collection[str] = (),
    ) -> None:
        self.name = name
        self._rank, self._ranks = communicator.rank, communicator.size
        self.fqns = [slot.fqn for slot in slots]
        self.places: Sequence[ParamPlaces] = [slot.places for slot in slots]
        self.leaves: list[nn.Parameter] = []
        self.memory: Sequence[torch.Tensor] = self.leaves
        self.distributed = local_parts([slot.param for slot in slots], own_dims)
        self.average_hook: Callable[[torch.Tensor], None] | None = None
        self.prepare_leaves: Callable[[], None] | None = None
        self._allocate = (
            functools.partial(communicator.empty_on_host, pin=pin) if offload else communicator.empty
        )
        self._accelerator = accelerator_of(communicator.device)
        self.offloaded = offload and self._accelerator is not None
        self._attributes = [dict(slot.param.__dict__) for slot in slots]
        self._marks = GradientMarks()
        self._arriving: list[tuple[ToHost, Sequence[bool]]] = []

    def _lay_out(
        self, extents: Sequence[Extent], bounds: Iterable[tuple[int, int]], shard_numel: int
    ) -> None:
        """Notes where the original parameters lie.

        Args:
            extents: In the unsharded buffer.
            bounds: The (start, stop) of what this rank holds of each, in its shard.
            shard_numel: Elements of a shard.
        """
        self.extents = extents
        self._sizes, self._indices = stretches(bounds, shard_numel)
        self.shard_numel, self.numel = shard_numel, shard_numel * self._ranks
        self.full_numel = self.numel

    def _take_over(self, slots: Sequence[ParamSlot]) -> None:
        """Copies this rank's parts of the original parameters, and shows what stands for them."""
        originals = [slot.param for slot in slots]
        self._adopt(self._new_shard(originals[0]))
        for index, (param, piece) in enumerate(zip(originals, self._pieces)):
            held = to_local(param)
            piece.copy_(self._own_part(index, held.detach()))
            held.data = piece  # whoever holds the original does not keep its memory alive
        if self.distributed is not None:  # no slice of a part is what a `DTensor` says of itself
            parts = zip(originals, self._pieces, self.distributed)
            originals = [
                param if part is None else nn.Parameter(piece, requires_grad=param.requires_grad)
                for param, piece, part in parts
            ]
            for param, attributes in zip(originals, self._attributes):
                param.__dict__.update(attributes)
        self._stand_for(originals)
        self._follow_places()
        self.hide_full()

    def _new_shard(self, like: torch.Tensor) -> torch.Tensor:
        """Makes a shard of zeros, of the dtype of another tensor, and on the meta device if that is there."""
        if like.is_meta:
            return torch.empty(self.shard_numel, dtype=like.dtype, device="meta")
        return self._allocate(self.shard_numel, like.dtype).zero_()

    @abstractmethod
    def _own_part(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what this rank holds of a tensor of an original parameter's shape."""

    @abstractmethod
    def _adopt(self, shard: torch.Tensor) -> None:
        """Makes `flat_param` of a shard, and notes the shard, its dtype and this rank's pieces."""

    @abstractmethod
    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        """Sets `sources` and `sharded_params`.

        Args:
            originals: Parameters that hold the pieces; the user's, in the layout that is made first.
        """

    # what there is

    @property
    def without_values(self) -> Sequence[str]:
        """Names of the parameters that are on the meta device still."""
        return self.fqns if self._shard.is_meta else ()

    def written(self) -> Written:
        """Two lists of numbers, of which some change when the shard is written to.

        Those at the place of an original parameter change with what stands for it. Not when it is written to
        through an alias without a version counter of its own, as `.data` is.
        """
        params = self.sharded_params
        return [*map(_VERSION, params), self.flat_param._version], [*map(_DATA_PTR, params)]

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that travels which belong to no parameter."""
        return self.numel - sum(extent.shape.numel() for extent in self.extents)

    @property
    def _parts(self) -> Sequence[LocalPart | None]:
        return self.distributed or [None] * len(self.extents)

    @abstractmethod
    def intervals(self) -> list[Interval]:
        """What this rank holds of each original parameter, perhaps nothing, for all that saves."""

    @abstractmethod
    def held_by_rank(self) -> list[list[int]]:
        """For each original parameter, how many of its elements each rank holds; these lie in rank order."""

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts something of the shard's size into this rank's pieces of the original parameters, as views."""
        return [piece.reshape(-1) for piece in self.cut(shard)]

    @abstractmethod
    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts something of the shard's size into views, one for each sharded parameter and in its shape."""

    # buffers

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of an unsharded buffer, one per original parameter, in its shape."""
        return [buffer[extent.start : extent.stop].view(extent.shape) for extent in self.extents]

    def as_originals(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what lies in views of an unsharded buffer, distributed as the original parameters were."""
        return [view if part is None else part.tensor(view) for view, part in zip(views, self._parts)]

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        """Views of a buffer that travels: for each original parameter the boxes in which it lies."""
        return [[view] for view in self.views(travelling)]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor of one original parameter's shape that have the shapes of its `parts`."""
        return [tensor]

    def packer(self, travelling: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        """Returns what writes one tensor for each original parameter into a buffer that travels.

        Zeros are written to its `padding`.
        """
        views, gaps = self.views(travelling), self.padding(travelling)

        def pack(tensors: list[torch.Tensor]) -> None:
            foreach_copy_(views, tensors)
            if gaps:
                foreach_zero_(gaps)

        return pack

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        """Views of those parts of a buffer that travels that belong to no parameter."""
        stops = [0, *(extent.stop for extent in self.extents)]
        starts = [*(extent.start for extent in self.extents), self.numel]
        return [travelling[stop:start] for stop, start in zip(stops, starts) if start > stop]

    def same_elements(
        self, travelling: torch.Tensor, full: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs views of the two buffers that must hold the same; none where they are one."""
        if self.in_place:
            return []
        return [
            pair
            for index, (view, parts) in enumerate(zip(self.views(full), self.parts(travelling)))
            for pair in zip(parts, self.split(index, view))
        ]

    def unpack(self, travelling: torch.Tensor) -> torch.Tensor:
        """Returns an unsharded buffer with what has travelled: the same tensor where that is possible."""
        full = travelling if self.in_place else travelling.new_empty(self.full_numel)
        for source, target in self.same_elements(travelling, full):
            target.copy_(source)
        return full

    def pack(self, full: torch.Tensor) -> torch.Tensor:
        """Undoes `unpack`."""
        travelling = full if self.in_place else full.new_zeros(self.numel)
        for target, source in self.same_elements(travelling, full):
            target.copy_(source)
        return travelling

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        """Makes the leaves: parameters that alias the unsharded buffer and need no gradient yet."""
        # Each with a version counter of its own.
        memory = [view.data for view in self.views(buffer)]
        if self.distributed is None:
            self.memory = self.leaves = [nn.Parameter(each, requires_grad=False) for each in memory]
        else:
            self.leaves = [
                nn.Parameter(each, requires_grad=False) if part is None else part.parameter(each)
                for each, part in zip(memory, self.distributed)
            ]
            self.memory = [*map(to_local, self.leaves)]
        for leaf, attributes in zip(self.leaves, self._attributes):
            leaf.__dict__.update(attributes)
        self._follow_places()
        return self.leaves

    def lie_in(self, views: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Lets leaves, given by number, lie in other views."""
        for index, view in views:
            self.memory[index].data = view

    def whole(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Returns what users see as the full values of an original parameter."""
        return full

    def taken_apart(self, index: int, value: Any) -> Any:
        """Undoes `whole`, in memory of its own, for a value that fits; any other is returned as it is."""
        return value

    def wanted(self, index: int) -> str | None:
        """Says what a full value of an original parameter must be, where its shape and dtype do not tell."""
        return None

    def write_shard(self, out: torch.Tensor) -> None:
        """Copies this rank's shard to where it travels from, cast to that dtype."""
        out.copy_(self._shard, non_blocking=True)

    def from_host(self, dtype: torch.dtype) -> FromHost | None:
        """Returns what sends the shard to the device in a dtype, if it lies in host memory."""
        accelerator, shard = self._accelerator, self.flat_param.data
        if accelerator is None or not self.offloaded or shard.is_meta or not accelerator.is_on_host(shard):
            return None
        return FromHost(accelerator, shard, dtype, self._allocate)

    def read_shard(self, own: torch.Tensor) -> None:
        """Copies this rank's part of an unsharded buffer back into the shard."""
        self._shard.data.copy_(own.data)

    # what the modules show

    def show(self, params: Sequence[torch.Tensor]) -> None:
        """Shows one tensor per original parameter in the modules."""
        ModuleWriter(self.places, params, self._shows_plain).show()

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        """Shows full parameters to the user, who may edit them in place.

        Args:
            params: One per original parameter.
            copies: Whether they are the user's to keep. Otherwise the user's own Parameter objects, where
                those are the sharded parameters and no `DTensor`s, stand for them.
        """
        self.show(params)

    def hide_full(self) -> None:
        """Undoes `show_full`: the modules show the sharded parameters again."""
        self.show_sharded()

    def shown(self) -> list[nn.Parameter | None]:
        """What the modules show now, one per original parameter."""
        return [*map(dict.get, self._registries, self._names)]

    def add_place(self, index: int, place: Place) -> None:
        """Lets one more place show an original parameter, which is sharded now."""
        self.places[index].add(*place)
        self._follow_places()
        self.show_sharded()

    def _stand_ins(self) -> Sequence[torch.Tensor]:
        """What modules show of the sharded parameters, for each original one."""
        return self.sources

    def _follow_places(self) -> None:
        """Goes over to where the places are now, and to what they are to show."""
        firsts = [next(iter(places)) for places in self.places]
        self._registries = [module._parameters for module, _ in firsts]
        self._names = [name for _, name in firsts]
        self.show_leaves = ModuleWriter(self.places, self.leaves, self._shows_plain).show
        self.cover = Cover(self.places, self.leaves)
        self.shown_sharded = Shown(self.places, self._stand_ins())
        self.show_sharded = self.shown_sharded.show

    # who contributed to the gradients

    def notes(self, travelling: torch.Tensor) -> torch.Tensor:
        """Views where in a buffer that will be reduced `note_used` notes something for other ranks."""
        return travelling

    @abstractmethod
    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes there which original parameters this rank has contributed to the gradients of."""

    @abstractmethod
    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes the same of all ranks, in a shard that was reduced in a way which loses notes.

        Args:
            shard: 1-D, in the reduce dtype.
            used: For each original parameter, whether any rank has contributed.
        """

    @abstractmethod
    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool], frozen: bool) -> Sequence[bool]:
        """Tells which original parameters any rank has used, all ranks alike.

        Args:
            shard: What was reduced, with what the ranks noted; neither divided nor cast since.
            used: For each original parameter, whether this rank has contributed to its gradient.
            frozen: Whether a parameter that is frozen now may have been used.
        """

    # gradients

    def add_reduced(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Adds a reduced gradient shard to the sharded parameters' gradients.

        Args:
            reduced: The shard, 1-D, in the gradients' dtype.
            used: For each original parameter, whether any rank contributed to its gradient. One that no
                rank used gets none, so that optimizers pass over it as they do on a plain module.
        """
        if self._marks:
            self._marks.take_away()
        if self._accelerator is not None:
            reduced = self._accelerator.beside(reduced, self._shard)
        grads, used = self._cut_gradients(reduced), self._having_gradients(used)
        for param, grad, by_any in zip(self.sharded_params, grads, used):
            if by_any:
                if param.grad is None:
                    param.grad = grad
                else:
                    to_local(param.grad).add_(to_local(grad))
        if any(map(HOOKS_OF, self.sharded_params)):
            run_gradient_hooks(self.sharded_params, used)

    @property
    def has_hooks(self) -> bool:
        """Whether users want to be called when sharded parameters have their gradients."""
        return any(map(HOOKS_OF, self.sharded_params))

    def send_to_host(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Lets what `add_reduced` takes go to the host, where `add_arrived` adds it."""
        accelerator = self._accelerator
        if accelerator is not None and accelerator.is_on_host(self._shard):
            self._arriving.append((ToHost(accelerator, reduced, self._allocate), used))
        else:  # a user has moved the shard
            self.add_reduced(reduced, used)

    def release_arriving(self) -> None:
        """Gives back the device's memory of gradients that are on their way to the host."""
        for arriving, _ in self._arriving:
            arriving.release()

    def add_arrived(self) -> None:
        """Adds the gradients that have come to the host, for which the caller has waited."""
        arrived, self._arriving = self._arriving, []
        for each, used in arrived:
            self.add_reduced(each.values, used)

    def drop_arriving(self) -> None:
        """Forgets the gradients that are on their way to the host."""
        self.release_arriving()
        self._arriving = []

    @abstractmethod
    def _cut_gradients(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cuts a shard of gradients as `cut` does, into what sharded parameters take."""

    def _having_gradients(self, used: Sequence[bool]) -> Sequence[bool]:
        """Tells which sharded parameters have gradients, if these original ones have."""
        return used

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        """Lets the sharded parameters take gradients of another dtype than their own."""
        for param in self.sharded_params:
            param.grad_dtype = None

    def mark_unsynced(self) -> None:
        """Makes the sharded parameters' gradients tell later whether they were zeroed meanwhile."""
        self._marks.put(self.sharded_params)

    def zeroed(self) -> list[bool]:
        """For each leaf, whether its gradient was zeroed since `mark_unsynced`."""
        return self._marks.zeroed(self.sources)

    def mark_partial(self) -> None:
        """Makes one gradient tell later whether all were zeroed meanwhile.

        It is that of the smallest parameter, since where it has none it gets zeros: a mark for each would
        take as much memory as the sums that are kept.
        """
        self._marks.put(self._smallest_trained())

    def zeroed_partial(self) -> bool:
        """Whether the gradient was zeroed since that `mark_partial` has marked."""
        return any(self._marks.zeroed(self._smallest_trained()))

    def _smallest_trained(self) -> Sequence[nn.Parameter]:
        pairs = zip(self.sources, self.extents)  # not sizes of slices, which ranks do not have alike
        trained = [(extent.shape.numel(), source) for source, extent in pairs if source.requires_grad]
        return [min(trained, key=itemgetter(0))[1]] if trained else []

    def write_gradient(self, out: torch.Tensor) -> None:
        """Copies this rank's shard of the gradient to where it travels from: zeros where there is none."""
        out.zero_()
        for param, piece in zip(self.sharded_params, self.cut(out)):
            if param.grad is not None:
                piece.copy_(to_local(param.grad))

    def read_gradient(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        """Replaces the sharded parameters' gradients.

        Args:
            own: This rank's part of the unsharded gradient; None where no parameter has one.
            present: For each original parameter, whether it has one. Gradients that would not change are
                left untouched, so that `zeroed` does not take them for the user's doing.
        """
        pieces = [None] * len(self.sharded_params) if own is None else self.cut(own)
        for param, piece, wanted in zip(self.sharded_params, pieces, self._having_gradients(present)):
            if piece is None or not wanted:
                param.grad = None
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or piece.dtype)
            held = to_local(param.grad)
            if not torch.equal(held, piece.to(held)):
                held.copy_(piece)

    def gradients(self) -> list[torch.Tensor | None]:
        """For each original parameter, this rank's piece of its gradient; None without a gradient."""
        return [None if param.grad is None else to_local(param.grad) for param in self.sources]

    def gradient_blocks(self) -> list[torch.Tensor]:
        """This rank's gradients in as few tensors as possible, none empty; zero padding may be among them."""
        grads = [to_local(each.grad) for each in self.sharded_params if each.grad is not None]
        return [grad for grad in grads if grad.numel()]

    # changes from outside

    @abstractmethod
    def follow_replaced(self) -> bool:
        """Takes over what the user has put, by `param.data = ...`, in the place of sharded parameters' data.

        Where all of it has another dtype, that becomes the master dtype.

        Returns:
            Whether the shard lies elsewhere now.

        Raises:
            ValueError: If it does not have the shape of the shard, or not one dtype.
        """

    def copied(self, memo: dict[int, Any]) -> Layout:
        """Returns a layout with sharded parameters of its own, of the same values, for the same modules.

        Args:
            memo: Of `copy.deepcopy`; the old sharded parameters stand for the new ones in it afterwards.
        """
        new = copy(self)
        new._marks, new._arriving, new.prepare_leaves = GradientMarks(), [], None
        new._adopt_copies()
        pieces = zip(new._pieces, self.sources)
        new._stand_for([nn.Parameter(piece, source.requires_grad) for piece, source in pieces])
        for old, own in zip(self._own_tensors(), new._own_tensors()):
            own.__dict__.update(old.__dict__ | own.__dict__)
            memo[id(old)] = own
        memo.update((id(leaf), leaf) for leaf in self.leaves)  # not copied: the new modules get leaves anew
        return new

    def _adopt_copies(self) -> None:
        """Goes over to a shard of its own, of the same values."""
        self._adopt(self._new_shard(self._shard).copy_(self.flat_param.data))

    def _own_tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that stand for the shard and its parts."""
        return [self.flat_param, *self.sources, *self._stand_ins()]

    def follow_modules(self, memo: dict[int, Any]) -> None:
        """Goes over to the copies of its modules, and shows the sharded parameters there."""
        self.places = deepcopy(self.places, memo)
        self._follow_places()
        self.hide_full()
