"""`Layout`: where the parameters of one segment lie in buffers, and which part of them each rank holds."""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from fsdp_wrap._core import ParamSlot, ShardAlignment, ceil_div, round_up
from fsdp_wrap._core.torch_private import foreach_copy_, foreach_zero_

ALIGNMENT_BYTES = 16
"""Start of every parameter in a buffer: matrix kernels round differently on less aligned weights."""


def alignment_of(slots: Sequence[ParamSlot]) -> int:
    """Returns the alignment of parameters in a buffer, in elements."""
    return max(1, ALIGNMENT_BYTES // slots[0].param.element_size())


_SHARED: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

_Kind = TypeVar("_Kind")


def shared(kind: Callable[..., _Kind], *arguments: Any) -> _Kind:
    """Returns an object without values that is made of these arguments: one for all who hold it.

    Units of the same shapes, as a model's blocks are, have their geometry once. What is made must hold no
    tensors: those of a plan are fake.
    """
    key = (kind, *arguments)
    made: _Kind | None = _SHARED.get(key)
    if made is None:
        made = _SHARED[key] = kind(*arguments)
    return made


@dataclass(frozen=True)
class Extent:
    """The range [start, stop) of one original parameter in the unsharded buffer, in elements."""

    fqn: str
    shape: torch.Size
    start: int

    @functools.cached_property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def within(self, first: int, length: int) -> tuple[int, int]:
        """Returns the overlap (start, stop) with [first, first + length), relative to `first`."""
        start = min(max(self.start - first, 0), length)
        return start, max(start, min(self.stop - first, length))


class Layout(ABC):
    """The places of one segment's parameters in buffers, and how ranks cut them: geometry, without values.

    The shards of all ranks, one after the other, are the gathered buffer. Full parameters are views of the
    unsharded buffer. Both are one buffer where that is possible; else parameters are copied from one to the
    other.

    Args:
        extents: Where the original parameters lie in the unsharded buffer.
        fqns: Their names within their unit.
        shard_numel: Elements of a rank's shard.
        rank: This rank among those that hold one copy of the parameters.
        ranks: Number of these.

    Attributes:
        numel: Elements of the gathered buffer with its padding: `shard_numel` x ranks.
        full_numel: Elements of the unsharded buffer with its padding: a multiple of the ranks.
        in_place: Whether the gathered buffer is the unsharded one.
        noted_numel: Elements at the end of each part that hold what `note_used` notes.
        packs_rows: Whether `packer` takes ranks x elements that do not lie side by side.
        sharded: Whether ranks have different parts.
        updated: For each sharded parameter, whether this rank updates it, if all original ones are used.
        alignment: Positions in parameters at which shards may begin.
    """

    extents: Sequence[Extent]
    sharded: bool
    updated: Sequence[bool]
    alignment: ShardAlignment | None
    in_place = True
    noted_numel = 0
    packs_rows = False

    def __init__(
        self, extents: Sequence[Extent], fqns: Sequence[str], shard_numel: int, rank: int, ranks: int
    ) -> None:
        self.extents, self.fqns = extents, fqns
        self.rank, self.ranks = rank, ranks
        self.shard_numel, self.numel = shard_numel, shard_numel * ranks
        self.full_numel = self.numel

    @property
    def padding_numel(self) -> int:
        """Elements of the gathered buffer that belong to no parameter."""
        return self.numel - sum(extent.shape.numel() for extent in self.extents)

    @abstractmethod
    def held_by_rank(self) -> list[list[int]]:
        """Returns, for each original parameter, the number of elements on each rank, in rank order."""

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a tensor of the shard's size into a 1-D view for each original parameter."""
        return [piece.reshape(-1) for piece in self.cut(shard)]

    @abstractmethod
    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a tensor of the shard's size into a view for each sharded parameter, in its shape."""

    def updated_by(self, used: Sequence[bool]) -> Sequence[bool]:
        """Returns for each sharded parameter whether this rank updates it, if these are used."""
        return used

    @abstractmethod
    def own_part(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a tensor of an original parameter's shape."""

    # buffers

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of an unsharded buffer for each original parameter, in its shape."""
        return [buffer[extent.start : extent.stop].view(extent.shape) for extent in self.extents]

    def parts(self, gathered: torch.Tensor) -> list[list[torch.Tensor]]:
        """Returns, for each original parameter, views of the boxes in which it lies in a gathered buffer."""
        return [[view] for view in self.views(gathered)]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a tensor of one original parameter's shape into views of the shapes of its `parts`."""
        return [tensor]

    def packer(self, gathered: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        """Returns a function that fills a reduce buffer, notes included, from all parameters' gradients."""
        views, gaps, notes = self.views(gathered), self.padding(gathered), self.notes(gathered)
        all_used = [True] * len(views)

        def pack(tensors: list[torch.Tensor]) -> None:
            foreach_copy_(views, tensors)
            if gaps:
                foreach_zero_(gaps)
            self.note_used(notes, all_used)

        return pack

    def padding(self, gathered: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the parts of a gathered buffer that belong to no parameter."""
        stops = [0, *(extent.stop for extent in self.extents)]
        starts = [*(extent.start for extent in self.extents), self.numel]
        return [gathered[stop:start] for stop, start in zip(stops, starts) if start > stop]

    def same_elements(
        self, gathered: torch.Tensor, full: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs views of the two buffers that must hold the same; none where they are one."""
        if self.in_place:
            return []
        return [
            pair
            for index, (view, parts) in enumerate(zip(self.views(full), self.parts(gathered)))
            for pair in zip(parts, self.split(index, view))
        ]

    def unpack(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns an unsharded buffer of the same values: the gathered one where that is possible."""
        full = gathered if self.in_place else gathered.new_empty(self.full_numel)
        for source, target in self.same_elements(gathered, full):
            target.copy_(source)
        return full

    def pack(self, full: torch.Tensor) -> torch.Tensor:
        """Undoes `unpack`."""
        gathered = full if self.in_place else full.new_zeros(self.numel)
        for target, source in self.same_elements(gathered, full):
            target.copy_(source)
        return gathered

    # notes on used parameters

    def notes(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns the view of a reduce buffer into which `note_used` writes."""
        return gathered

    @abstractmethod
    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        """Writes for other ranks to which original parameters' gradients this rank has contributed."""

    @abstractmethod
    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        """Writes the notes of all ranks into a shard whose reduction loses them.

        Args:
            shard: 1-D, in the reduce dtype.
            used: For each original parameter, whether any rank has contributed.
        """

    @abstractmethod
    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool], asked: Sequence[bool]) -> Sequence[bool]:
        """Returns for each original parameter whether any rank has used it, all ranks alike.

        Args:
            shard: The reduced shard with the notes; neither divided nor cast since.
            used: For each original parameter, whether this rank has contributed to its gradient.
            asked: For each original parameter, whether another rank may have, all ranks alike.
        """


class EvenCut:
    """Where parameters lie that are stored side by side, and one rank's even part of them.

    Args:
        shapes: Names and shapes of the parameters.
        start_at: Number of elements at multiples of which parameters begin.
        ranks: Number of parts.
        rank: The rank.
        alignment: Positions in parameters at which parts may begin, at the cost of padding.

    Attributes:
        first: Index of this rank's first element.
        bounds: For each parameter, the (start, stop) of this rank's piece in its part.
        begins: The first elements of these pieces, in their parameters.
        updated: Whether this rank has anything to update: not where it has none of a parameter's elements.
        sizes: Sizes of pieces and gaps, for one `split_with_sizes` of a part.
        indices: The index of each piece among them.
        firsts: For each parameter, the first elements of the pieces of all ranks.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, torch.Size]],
        start_at: int,
        ranks: int,
        rank: int,
        alignment: ShardAlignment | None,
    ) -> None:
        self.ranks, self.rank, self.alignment = ranks, rank, alignment
        self.fqns = [fqn for fqn, _ in shapes]
        self.extents = extents = _side_by_side(shapes, start_at, alignment)
        length = max(1, ceil_div(extents[-1].stop, ranks))
        if alignment is not None:
            length = round_up(length, alignment.common_grain(self.fqns, [shape for _, shape in shapes]))
        self.shard_numel, self.first = length, length * rank
        self.bounds = [extent.within(self.first, length) for extent in extents]
        pairs = [*zip(extents, self.bounds)]
        self.begins = [
            self.first + start - extent.start if stop > start else 0 for extent, (start, stop) in pairs
        ]
        # Plain optimizers keep state of an empty parameter.
        self.updated = [stop > start or not extent.shape.numel() for extent, (start, stop) in pairs]
        self.sizes, self.indices = _stretches(self.bounds, length)
        self.firsts = [_firsts_of_pieces(extent, length) for extent in extents]


class FlatLayout(Layout):
    """Parameters side by side in one buffer, which is cut into one even shard per rank.

    The ranks note the used parameters in the reduction itself. A rank without a gradient contributes -0.0,
    and a sum of zeros is -0.0 only if all summands are. So the first number of each rank's piece of a
    parameter serves as the note: a rank that has used the parameter makes sure that it is not -0.0.

    Args:
        cut: Where the parameters lie, and this rank's part of them.
        sharded: Whether the buffer is cut; otherwise every rank's shard is the whole.
    """

    _firsts: torch.Tensor  # once gradients come: the first elements of all pieces
    _zeros: torch.Tensor  # and as many zeros of their dtype
    _noted_in: torch.dtype | None = None  # that dtype

    def __init__(self, cut: EvenCut, sharded: bool) -> None:
        super().__init__(cut.extents, cut.fqns, cut.shard_numel, cut.rank, cut.ranks)
        self.even, self.sharded, self.alignment = cut, sharded, cut.alignment
        self.updated = cut.updated

    def held_by_rank(self) -> list[list[int]]:
        firsts = range(0, self.numel, self.shard_numel)
        bounds = ([extent.within(first, self.shard_numel) for first in firsts] for extent in self.extents)
        return [[stop - start for start, stop in ranks] for ranks in bounds]

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a shard into this rank's pieces of the original parameters: 1-D, or whole if not sharded."""
        if not self.sharded:
            return self.views(shard)
        parts = torch.split_with_sizes(shard, self.even.sizes)
        return [*map(parts.__getitem__, self.even.indices)]

    cut = pieces

    def updated_by(self, used: Sequence[bool]) -> Sequence[bool]:
        return [*map(operator.and_, used, self.even.updated)]

    def own_part(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        begin, (start, stop) = self.even.begins[index], self.even.bounds[index]
        own = tensor.reshape(-1)[begin : begin + stop - start]
        return own if self.sharded else own.view(self.extents[index].shape)

    # notes on used parameters

    def _known_used(self, used: Sequence[bool]) -> Sequence[bool]:
        """Returns which original parameters are known to have a gradient, if these were used."""
        return used

    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        if self._noted_in is not notes.dtype:
            self._prepare_notes(notes)
        notes.index_add_(0, self._firsts, self._zeros)  # -0.0 + 0.0 is 0.0
        if False in used:  # one by one: an index tensor for the device would make the host wait
            unused = [not known for known in self._known_used(used)]
            for first in chain.from_iterable(compress(self.even.firsts, unused)):
                notes[first].fill_(-0.0)

    @torch.inference_mode(False)
    def _prepare_notes(self, notes: torch.Tensor) -> None:
        firsts = [*chain.from_iterable(self.even.firsts)]
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=notes.device)
        self._zeros = notes.new_zeros(1).expand_as(self._firsts)  # one number
        self._noted_in = notes.dtype

    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        for (start, stop), by_any in zip(self.even.bounds, self._known_used(used)):
            if by_any and stop > start:
                shard[start] += 0.0
            else:
                shard[start:stop] = -0.0

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool], asked: Sequence[bool]) -> Sequence[bool]:
        result = [*self._known_used(used)]
        firsts = {
            index: start
            for index, ((start, stop), known, asks) in enumerate(zip(self.even.bounds, result, asked))
            if asks and not known and stop > start
        }
        if firsts:  # to look at numbers waits for the device
            noted = torch.stack([shard[first] for first in firsts.values()]).tolist()
            for index, number in zip(firsts, noted):
                result[index] = number != 0 or math.copysign(1, number) > 0
        return result


class JointLayout(FlatLayout):
    """Parameters side by side that have one gradient between them: what uses one uses all."""

    def __init__(self, cut: EvenCut, sharded: bool) -> None:
        super().__init__(cut, sharded)
        self.updated = (True,)

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        return [shard]

    def updated_by(self, used: Sequence[bool]) -> Sequence[bool]:
        return [any(used)]

    def _known_used(self, used: Sequence[bool]) -> Sequence[bool]:
        return [any(used)] * len(used)


def _side_by_side(
    shapes: Iterable[tuple[str, torch.Size]], start_at: int, alignment: ShardAlignment | None
) -> list[Extent]:
    """Lays parameters, given by name and shape, out in one buffer."""
    extents: list[Extent] = []
    stop = 0
    for fqn, shape in shapes:
        grain = 1 if alignment is None else alignment.grain(shape)
        extents.append(Extent(fqn, shape, round_up(stop, math.lcm(start_at, grain))))
        stop = extents[-1].stop
    return extents


def _firsts_of_pieces(extent: Extent, length: int) -> list[int]:
    """Returns the first elements of a parameter's pieces in even parts of this length."""
    begin, end = extent.start, extent.stop
    return [begin, *range(begin // length * length + length, end, length)] if end > begin else []


def _stretches(bounds: Iterable[tuple[int, int]], length: int) -> tuple[list[int], list[int]]:
    """Returns arguments for one `split_with_sizes` of a 1-D tensor into pieces and the gaps between them.

    Args:
        bounds: The (start, stop) of each piece, in order; equal ones for an empty piece.
        length: Elements of the tensor.

    Returns:
        The sizes, and the index of each piece among them.
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
    return [*sizes, length - end, 0], indices  # the last is for all empty pieces
