"""`ShardedParams`: this rank's shard of one segment, and the parameters that users and optimizers see."""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from fsdp_wrap._comm import Communicator, FromHost, accelerator_of
from fsdp_wrap._core import ParamPlaces, ParamSlot, Place
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import LocalPart, to_local
from fsdp_wrap._params.shard_gradients import ShardGradients
from fsdp_wrap._params.showing import SegmentDisplay
from fsdp_wrap._params.side_data import SideData, side_data_of

Written = tuple[tuple[int, ...], tuple[int, ...]]
"""Version counters and addresses of tensors."""

_VERSION, _DTYPE, _DATA_PTR = attrgetter("_version"), attrgetter("dtype"), torch.Tensor.data_ptr

_SAMPLED = 64  # elements of a shard


@dataclass(frozen=True)
class Interval:
    """The contiguous piece of one flattened original parameter that a rank holds.

    Attributes:
        fqn: Name of the original parameter within its unit.
        shape: Shape of the original parameter.
        start: Index of the piece's first element in the flattened parameter, or in the flattened `part`.
        data: The piece, 1-D, in master dtype; writing into it changes the sharded parameter.
        source: The sharded parameter that holds it.
        offset: Index of the piece's first element in the flattened `source`.
        at: Index of the parameter's first element in a buffer that is cut evenly; 0 in one cut by itself.
        part: The part of the parameter that is sharded, where tensor parallelism has distributed it.
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
        """Shape of the tensor that is sharded: the parameter or its `part`."""
        return self.shape if self.part is None else self.part.held_shape

    def own(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the piece's elements, 1-D, of a tensor of the parameter's shape."""
        held = full if self.part is None else self.part.cut(full)
        return held.reshape(-1)[self.start : self.stop]

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened parameter."""
        return self.start + self.data.numel()

    def within(self, like_source: torch.Tensor) -> torch.Tensor:
        """Returns the piece's elements of a tensor of `source`'s shape, such as optimizer state."""
        return like_source.reshape(-1).narrow(0, self.offset, self.data.numel())


def memory_around(tensors: Sequence[torch.Tensor], starts: Sequence[int], numel: int) -> torch.Tensor | None:
    """Returns the memory, 1-D, that all tensors are consecutive parts of; None if there is none.

    Args:
        tensors: At least one.
        starts: The element of the memory at which each tensor must begin; the first at 0.
        numel: Elements of the memory.
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


def named_shapes(slots: Iterable[ParamSlot]) -> list[tuple[str, torch.Size]]:
    """Returns names and shapes of the tensors that are sharded."""
    return [(slot.fqn, to_local(slot.param).shape) for slot in slots]


PartOf = Callable[[str, torch.Tensor], LocalPart | None]

_NO_ATTRIBUTES: dict[str, Any] = {}  # of most parameters


def _attributes_of(slot: ParamSlot, part: LocalPart | None, side: SideData | None) -> dict[str, Any]:
    """Returns the attributes that all tensors which stand for a parameter carry."""
    if side is not None:
        return side.attributes
    if part is not None:
        return part.attributes(slot.param)
    return dict(vars(slot.param)) or _NO_ATTRIBUTES


class Owner(Protocol):
    """The unit that owns the parameters of a segment."""

    def name_of(self, param: str) -> str:
        """Returns a parameter's name relative to the root, from its name relative to the unit."""

    def prepare_leaves(self) -> bool:
        """Lets the leaves take gradients outside of a forward; returns False before the unit's first use."""


class ShardedParams(ABC):
    """This rank's shard of one segment, and the sharded parameters that lie in it.

    The leaves alias the unsharded buffer.

    Args:
        name: Name of the segment within its unit.
        layout: Where the parameters lie in buffers, and which part of them this rank holds.
        slots: The original parameters.
        communicator: Allocates the shard.
        offload: Whether the shard lives in host memory.
        pin: Whether that memory is pinned.
        part_of: Returns the distributed part of a parameter, by name; None for one that is not distributed.

    Attributes:
        memory: The tensors that alias the unsharded buffer: the leaves, or their local parts.
        distributed: The distributed part of each original parameter; None where none is distributed.
        side_data: What each original parameter keeps beside its tensor; None for most.
        gradients: The reduced gradients on the sharded parameters.
    """

    dtype: torch.dtype  # master dtype
    flat_param: nn.Parameter  # its data are this rank's shard, whether or not the optimizer sees it
    sources: Sequence[nn.Parameter]  # for each leaf, the sharded parameter that stands for it
    sharded_params: Sequence[nn.Parameter]  # each once
    display: SegmentDisplay
    reads = 0  # calls of `read_shard`, alike on all ranks
    extended = False  # whether tensor subclasses give the tensors to gather, and make the leaves
    resident: torch.Tensor | None = None  # the unsharded buffer, where it is the shard, always in memory
    _gradients_kind: ClassVar[type[ShardGradients]] = ShardGradients
    _shard: torch.Tensor
    _pieces: list[torch.Tensor]

    def __init__(
        self,
        name: str,
        layout: Layout,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        offload: bool,
        pin: bool = True,
        part_of: PartOf = lambda _, param: LocalPart.of(param),
    ) -> None:
        self.name, self.layout = name, layout
        self.leaves: list[nn.Parameter] = []
        self.memory: Sequence[torch.Tensor] = self.leaves
        parts = [part_of(slot.fqn, slot.param) for slot in slots]
        self.distributed = parts if any(parts) else None
        self._owner: weakref.ref[Owner] | None = None
        self._allocate = (
            functools.partial(communicator.empty_on_host, pin=pin) if offload else communicator.empty
        )
        self._accelerator = accelerator_of(communicator.device)
        self.offloaded = offload and self._accelerator is not None
        self.side_data = (*[side_data_of(slot.fqn, slot.param) for slot in slots],)
        self._attributes = (*map(_attributes_of, slots, parts, self.side_data),)
        self.gradients = self._gradients_kind(layout, self._accelerator, self._allocate)

    def _take_over(self, slots: Sequence[ParamSlot]) -> None:
        """Copies this rank's parts of the original parameters, and shows the sharded ones."""
        originals = [slot.param for slot in slots]
        self._adopt(self._new_shard(originals[0]))
        for index, (param, piece) in enumerate(zip(originals, self._pieces)):
            held = to_local(param)
            piece.copy_(self.layout.own_part(index, held.detach()))
            held.data = piece  # a reference to the original does not keep its memory alive
        if self.distributed is not None:  # a `DTensor` cannot hold a slice of its part
            parts = zip(originals, self._pieces, self.distributed)
            originals = [
                param if part is None else nn.Parameter(piece, requires_grad=param.requires_grad)
                for param, piece, part in parts
            ]
            for param, attributes in zip(originals, self._attributes):
                param.__dict__.update(attributes)
        self._stand_for(originals)
        self._show_in([slot.places for slot in slots])
        self.hide_full()

    def _new_shard(self, like: torch.Tensor) -> torch.Tensor:
        """Makes a shard of zeros in another tensor's dtype, or on the meta device where that is."""
        if like.is_meta:
            return torch.empty(self.layout.shard_numel, dtype=like.dtype, device="meta")
        return self._allocate(self.layout.shard_numel, like.dtype).zero_()

    @abstractmethod
    def _adopt(self, shard: torch.Tensor) -> None:
        """Sets `flat_param`, `dtype`, `_shard` and `_pieces` from a shard."""

    @abstractmethod
    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        """Sets `sources` and `sharded_params`, from parameters that hold the pieces."""

    # contents

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, which the sharded parameters alias."""
        return self._shard

    @property
    def without_values(self) -> Sequence[str]:
        """Names of the parameters that are still on the meta device."""
        return self.layout.fqns if self._shard.is_meta else ()

    def written(self) -> Written:
        """Returns version counters and addresses of the sharded parameters, which writes change.

        A write through an alias without a version counter, as `.data` is, changes none.
        """
        params = self.sharded_params
        return (*map(_VERSION, params), self.flat_param._version), (*map(_DATA_PTR, params),)

    def sample(self) -> torch.Tensor:
        """Views some elements of the shard, evenly apart."""
        shard = self.flat_param.data
        return shard[:: max(1, shard.numel() // _SAMPLED)]

    @property
    def _parts(self) -> Sequence[LocalPart | None]:
        return self.distributed or [None] * len(self.layout.extents)

    @abstractmethod
    def intervals(self) -> list[Interval]:
        """Returns this rank's piece of each original parameter, perhaps an empty one."""

    # buffers

    def as_originals(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns views of an unsharded buffer as modules had them: `DTensor`s where the originals were."""
        return [view if part is None else part.shown(view) for view, part in zip(views, self._parts)]

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        """Makes the leaves: parameters that alias the unsharded buffer and need no gradient yet."""
        # Each with a version counter of its own.
        memory = [view.data for view in self.layout.views(buffer)]
        if self.distributed is None:
            self.memory = self.leaves = [*map(self.parameter, range(len(memory)), memory)]
        else:
            self.leaves = [
                nn.Parameter(tensor, requires_grad=False) if part is None else part.parameter(tensor)
                for tensor, part in zip(memory, self.distributed)
            ]
            self.memory = [*map(to_local, self.leaves)]
        for leaf, attributes in zip(self.leaves, self._attributes):
            leaf.__dict__.update(attributes)
        self._display_leaves()
        return self.leaves

    def parameter(self, index: int, value: torch.Tensor, requires_grad: bool = False) -> nn.Parameter:
        """Returns a parameter of the original's class with other values, such as its full ones."""
        side = self.side_data[index]
        return nn.Parameter(value, requires_grad) if side is None else side.parameter(value)

    def plain_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a leaf's gradient as a plain, dense tensor."""
        return grad if grad.layout is torch.strided else grad.to_dense()

    def lie_in(self, views: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Moves leaves, given by number, to other views."""
        for index, view in views:
            self.memory[index].data = view

    def whole(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Returns the full values of an original parameter as users see them."""
        return full

    def taken_apart(self, index: int, value: Any) -> Any:
        """Undoes `whole`, in memory of its own; a value that does not fit is returned as it is."""
        return value

    def wanted(self, index: int) -> str | None:
        """Describes the full value of an original parameter, where shape and dtype do not."""
        return None

    def write_shard(self, out: torch.Tensor) -> None:
        """Copies this rank's shard to its part of a gathered buffer, cast to that dtype."""
        out.copy_(self._shard, non_blocking=True)

    def from_host(self, dtype: torch.dtype) -> FromHost | None:
        """Returns the copier of a shard in host memory to the device, in a dtype; None elsewhere."""
        accelerator, shard = self._accelerator, self.flat_param.data
        if accelerator is None or not self.offloaded or shard.is_meta or not accelerator.is_on_host(shard):
            return None
        return FromHost(accelerator, shard, dtype, self._allocate)

    def read_shard(self, own: torch.Tensor) -> None:
        """Copies this rank's part of an unsharded buffer back into the shard."""
        self.reads += 1  # no version counter moves: the values may be the same
        self._shard.data.copy_(own.data)

    # module attributes

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        """Shows full parameters to the user, who may edit them in place.

        Args:
            params: One per original parameter.
            copies: Whether they are the user's to keep. Otherwise sharded parameters that are the user's own
                objects, and no `DTensor`s, take their data.
        """
        self.display.show_others(params)

    def hide_full(self) -> None:
        """Undoes `show_full`: the modules show the sharded parameters again."""
        self.display.show_sharded()

    def add_place(self, index: int, place: Place) -> None:
        """Lets one more place show an original parameter, which is sharded now."""
        self.display.places[index].add(*place)
        self._show_in(self.display.places)
        self.display.show_sharded()

    def _stand_ins(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that modules show while sharded, for each original parameter."""
        return self.sources

    def _show_in(self, places: Sequence[ParamPlaces]) -> None:
        """Prepares the display anew, since places or tensors have changed."""
        self.display = self._display_in(places)
        self._display_leaves()

    def _display_in(self, places: Sequence[ParamPlaces]) -> SegmentDisplay:
        """Returns a display of the sharded parameters."""
        return SegmentDisplay(self.layout.fqns, places, self._stand_ins())

    def _display_leaves(self) -> None:
        """Lets the display show the leaves, which have been made anew."""
        self.display.take_leaves(self.leaves)

    # changes by users, and copies

    @abstractmethod
    def follow_replaced(self) -> bool:
        """Takes over data that the user has put into sharded parameters (`param.data = ...`).

        Another dtype, if all have it, becomes the master dtype. Another shape, or several dtypes, raise
        ValueError.

        Returns:
            Whether the shard has moved.
        """

    def belong_to(self, owner: Owner) -> None:
        """Sets the unit that owns the parameters; it is not kept alive."""
        self._owner = weakref.ref(owner)

    @property
    def owner(self) -> Owner | None:
        """The unit that owns the parameters; None before there is one, and when it has gone."""
        return None if self._owner is None else self._owner()

    def name_of(self, fqn: str) -> str:
        """Returns a parameter's name relative to the root, from its name relative to the unit."""
        owner = self.owner
        return fqn if owner is None else owner.name_of(fqn)

    def copied(self, memo: dict[int, Any]) -> ShardedParams:
        """Returns the same for copies of the sharded parameters, in the same modules yet.

        `memo` of `copy.deepcopy` then leads from the old sharded parameters to the new ones.
        """
        new = copy(self)
        new.gradients, new._owner = self.gradients.copied(), None
        new.side_data = deepcopy(self.side_data, memo)
        new._attributes = (
            *[
                attributes if side is None else side.attributes
                for attributes, side in zip(self._attributes, new.side_data)
            ],
        )
        new._adopt_copies()
        trains = (source.requires_grad for source in self.sources)
        new._stand_for([*map(new.parameter, range(len(self.sources)), new._pieces, trains)])
        for old, own in zip(self._own_tensors(), new._own_tensors()):
            own.__dict__.update(old.__dict__ | own.__dict__)
            memo[id(old)] = own
        memo.update((id(leaf), leaf) for leaf in self.leaves)  # the new modules get leaves anew
        return new

    def _adopt_copies(self) -> None:
        """Replaces the shard by a copy."""
        self._adopt(self._new_shard(self._shard).copy_(self.flat_param.data))

    def _own_tensors(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that stand for the shard and its parts."""
        return [self.flat_param, *self.sources, *self._stand_ins()]

    def follow_modules(self, memo: dict[int, Any]) -> None:
        """Moves to the copies of its modules, and shows the sharded parameters there."""
        self._show_in(deepcopy(self.display.places, memo))
        self.hide_full()


def same_sample(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two samples are the same, also where they are not numbers."""
    as_bytes = [sampled.contiguous().view(torch.uint8) for sampled in (one, other)]
    return one.device == other.device and torch.equal(*as_bytes)


def distributed_names(params: Iterable[ShardedParams]) -> list[str]:
    """Returns the names, within their unit, of parameters that were distributed before they were sharded."""
    return [
        fqn
        for sharded in params
        for fqn, part in zip(sharded.layout.fqns, sharded.distributed or ())
        if part is not None
    ]
