"""How a unit's parameters and gradients travel, and what it holds between its verbs.

Those are parameters that some ranks keep, and a reduction in flight. Small units travel together: a rank's
shards of several lie one after the other in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from fsdp_wrap._comm import Buffer, Communicator, Finished, Pending
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params.segment import Segment

_ALIGNMENT_BYTES = 16
"""Start of every shard in a buffer that several units share, so that it can be seen in any dtype."""

ReduceScatter = Callable[[list[torch.Tensor], list[torch.Tensor]], Pending]
"""Fills the shards given first from the unsharded 1-D tensors given second, which it may spoil."""


class Transport(Protocol):
    """How parameters and gradients travel between the ranks of one copy, as a `Communicator` lets them.

    Attributes:
        keeps_notes: Whether what layouts note in a reduction arrives.
        compresses_reductions: Whether gradients travel in fewer bytes, which a communication hook would end.
    """

    keeps_notes: bool
    compresses_reductions: bool

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending: ...

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending: ...


class InReduction(Protocol):
    """What takes the gradients of a unit until their sums are there, or not to be.

    Attributes:
        partial: Whether the sums are kept for the next reduction, of which they are part.
    """

    partial: bool

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class KeptParameters:
    """The full parameters of a unit, evenly cut within some ranks that keep them from forward to backward."""

    def __init__(self, segments: list[Segment], within: Communicator) -> None:
        self._within = within
        self._parts = [within.own_part(segment.full.data).clone() for segment in segments]

    def gather(self, segments: list[Segment]) -> Pending:
        """Fills the unsharded buffers."""
        full = [segment.full for segment in segments]

        def fill() -> None:
            for target, part in zip(full, self._parts):
                self._within.own_part(target.data).copy_(part)

        return self._within.gather_into(full, fill)


class NotedReduction:
    """A reduction that loses what the ranks have noted (by a hook, encoded), with the notes beside it.

    Args:
        segments: Whose gradients are reduced.
        shards: What comes of them.
        pending: The reduction.
        ranks: Over which it sums.
    """

    def __init__(
        self, segments: list[Segment], shards: list[torch.Tensor], pending: Pending, ranks: Communicator
    ) -> None:
        self._segments, self._shards, self._pending = segments, shards, pending
        self._used = [mine for segment in segments for mine in segment.gradients.used]
        self._counts = torch.ones(len(self._used), dtype=torch.float32, device=ranks.device)
        for index, mine in enumerate(self._used):
            if not mine:
                self._counts[index].zero_()
        self._counting = ranks.all_reduce([self._counts])

    def wait(self) -> None:
        self._pending.wait()
        self._counting.wait()
        known = all(self._used)  # looking at numbers makes the host wait
        used = iter(self._used if known else [count > 0 for count in self._counts.tolist()])
        for segment, shard in zip(self._segments, self._shards):
            by_any = [next(used) for _ in segment.leaves]
            segment.layout.note_in_shard(shard, by_any)


class Reduction:
    """A reduction in flight: its buffers, what is still to be done, and where the result goes.

    The sum over the replicas, if any, follows that within the copy, at once if that is finished already.

    Args:
        segments: Whose gradients are reduced.
        shards: What comes of them.
        pending: The sum within the copy.
        replicas: Over which it sums then; None to keep the sum for the next reduction, of which it is part.
        summed: What it sums there, of which the shards are views; None for the shards.

    Attributes:
        partial: Whether the sums are kept for the next reduction, of which they are part.
    """

    def __init__(
        self,
        segments: list[Segment],
        shards: list[torch.Tensor],
        pending: Pending,
        replicas: Communicator | None,
        summed: list[torch.Tensor] | None = None,
    ) -> None:
        self._segments, self._shards, self._pending = segments, shards, pending
        self._summed = shards if summed is None else summed
        self._replicas, self.partial = replicas, replicas is None
        self._in_copy = True
        self._over_replicas: Pending | None = None
        if isinstance(pending, Finished):
            self._leave_copy()

    def _leave_copy(self) -> None:
        self._in_copy = False
        for segment, shard in zip(self._segments, self._shards):
            if segment.gradients.partial is not None:
                shard.add_(segment.gradients.partial)
                segment.gradients.partial = None
        if self._replicas is not None and self._replicas.size > 1:
            self._over_replicas = self._replicas.all_reduce(self._summed)

    def finish(self) -> None:
        """Waits, and hands the sums to the segments."""
        if self._in_copy:
            self._pending.wait()
            self._leave_copy()
        if self._over_replicas is not None:
            self._over_replicas.wait()
        for segment, shard in zip(self._segments, self._shards):
            if self._replicas is None:
                segment.gradients.keep_partial(shard)
            else:
                segment.gradients.add_reduced(shard)

    def abandon(self) -> None:
        """Waits, and drops what was to be reduced."""
        self._pending.wait()
        if self._over_replicas is not None:
            self._over_replicas.wait()
        for segment in self._segments:
            segment.gradients.drop()


def travelling_nbytes(segments: Sequence[Segment], ranks: int) -> int:
    """Returns how many bytes the shards of a unit take in a buffer that it shares with others."""
    return ranks * sum(_aligned(segment.gathered.nbytes // ranks) for segment in segments)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class BatchedGather:
    """One gather of the shards of several units, in one buffer of bytes.

    What came is copied from there to a unit's own buffers when that waits. The last one frees the buffer.

    Args:
        communicator: That of all the units.
        units: The segments of each.

    Attributes:
        pending: What was issued last.
    """

    @torch.inference_mode(False)
    def __init__(self, communicator: Communicator, units: Sequence[Sequence[Segment]]) -> None:
        self._communicator = communicator
        ranks = communicator.size
        self._buffer = communicator.buffer(
            sum(travelling_nbytes(segments, ranks) for segments in units), torch.uint8
        )
        parts = self._buffer.data.view(ranks, -1)
        self._own: list[torch.Tensor] = []
        self._rides: list[GatherShare] = []
        begin = 0
        for segments in units:
            places = []
            for segment in segments:
                end = begin + segment.gathered.nbytes // ranks
                places.append(parts[:, begin:end].view(segment.dtypes.param))
                self._own.append(places[-1][communicator.rank])
                begin += _aligned(end - begin)
            self._rides.append(GatherShare(self, places))
        self._buffer.free()
        self.pending: Pending = Finished()
        self._left = 0

    def issue(self, units: Sequence[Sequence[Segment]]) -> list[GatherShare]:
        """Issues it.

        Args:
            units: Their segments, of the same sizes and dtypes as before.

        Returns:
            What each of the units must begin, and then wait for.
        """
        shards = [segment.shard for segment in chain.from_iterable(units)]
        self.pending = self._communicator.gather_into(
            [self._buffer], lambda: foreach_copy_(self._own, shards, non_blocking=True)
        )
        self._left = len(units)
        return self._rides

    def leave(self) -> None:
        """Notes that one of the units has what it waited for."""
        self._left -= 1
        if not self._left:
            self.pending = Finished()
            self._buffer.free()


class GatherShare:
    """What one unit waits for whose shards were gathered with others' (a `Pending`).

    Args:
        gather: The gather.
        places: Where its shards come, those of one segment after the other's: a row for each rank.
    """

    def __init__(self, gather: BatchedGather, places: list[torch.Tensor]) -> None:
        self._gather, self._places = gather, places
        self._segments: Sequence[Segment] = ()
        self._full: list[Buffer] = []  # for which the copies were found
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def begin(self, segments: Sequence[Segment]) -> None:
        """Notes where to copy what comes."""
        self._segments = segments

    def wait(self) -> None:
        """Waits for the gather, and fills the unsharded buffers."""
        self._gather.pending.wait()
        full = [segment.full for segment in self._segments]
        for buffer in full:
            buffer.allocate()
        if full != self._full:
            self._full, self._copies = full, self._find_copies()
        foreach_copy_(*self._copies)
        self._segments = ()
        self._gather.leave()

    @torch.inference_mode(False)
    def _find_copies(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for segment, place in zip(self._segments, self._places):
            pairs = segment.layout.same_elements(place, segment.full.data)
            if segment.layout.in_place:
                pairs = [(place, segment.full.data.view(len(place), -1))]
            sources += [source for source, _ in pairs]
            targets += [target for _, target in pairs]
        return targets, sources


class _Place(NamedTuple):
    """Where a segment's gradients lie in a buffer that several units share.

    Attributes:
        parts: A row for each rank.
        begin: The first element of a row.
        end: The one after the last.
    """

    parts: torch.Tensor
    begin: int
    end: int


class BatchedGradients:
    """One buffer for the gradients of several units: the parts of a rank one after the other.

    Args:
        communicator: That of all the units.
        segments: Theirs, which travel in one dtype, and are summed in one.

    Attributes:
        dtype: That in which they travel.
    """

    @torch.inference_mode(False)
    def __init__(self, communicator: Communicator, segments: Sequence[Segment]) -> None:
        self._communicator = communicator
        self.dtype, self._sums = segments[0].gradients.travels_in, segments[0].dtypes.reduce
        self._begun = False
        step = max(1, _ALIGNMENT_BYTES // self.dtype.itemsize)
        begins, numel = [], 0
        for segment in segments:
            begins.append(numel)
            numel += -(-segment.layout.shard_numel // step) * step
        self._buffer = communicator.buffer(numel * communicator.size, self.dtype)
        self._parts = self._buffer.data.view(communicator.size, -1)
        self._places: list[_Place] = []
        self._gaps: list[torch.Tensor] = []
        for segment, begin, stop in zip(segments, begins, [*begins[1:], numel]):
            end = begin + segment.layout.shard_numel
            self._places.append(_Place(self._parts[:, begin:end], begin, end))
            if end < stop:
                self._gaps.append(self._parts[:, end:stop])
        self._buffer.free()

    def take(self, index: int, full: torch.Tensor) -> None:
        """Copies the gradients of one segment, by its number."""
        if not self._begun:
            self._begun = True
            self._buffer.allocate()
            for gap in self._gaps:
                gap.zero_()
        parts = self._places[index].parts
        parts.copy_(full.view(len(parts), -1))

    def reduce(self, taken: Sequence[int]) -> tuple[Pending, torch.Tensor, list[torch.Tensor]]:
        """Issues the reduction.

        Args:
            taken: The numbers of the segments of which there are gradients.

        Returns:
            It, what comes of it, and the parts of that which belong to those segments, in their order.
        """
        for index, place in enumerate(self._places):
            if index not in taken:  # where NaN may lie, at which checks of what is sent would stop
                place.parts.zero_()
        shard = self._communicator.empty(self._parts.shape[1], self._sums)
        pending = self._communicator.reduce_scatter([shard], [self._buffer.data])
        places = [self._places[index] for index in taken]
        # Each with a version counter of its own, and the base of its gradients: as if it came alone.
        return pending, shard, [shard[place.begin : place.end].data for place in places]

    def free(self) -> None:
        """Gives the memory back; nothing may be in flight."""
        self._begun = False
        self._buffer.free()
