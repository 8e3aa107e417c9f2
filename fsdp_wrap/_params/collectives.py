"""Gathers and reductions: of one unit, and batched for several small units.

In a batch, a rank's shards of several units lie one after the other in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Protocol

import torch

from fsdp_wrap._comm import Buffer, Communicator, Finished, GroupPositions, Pending
from fsdp_wrap._core import round_up
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params.gradients import BatchPlace
from fsdp_wrap._params.layout import ALIGNMENT_BYTES
from fsdp_wrap._params.segment import Segment

_FULL = attrgetter("full")

ReduceScatter = Callable[[list[torch.Tensor], list[torch.Tensor]], Pending]
"""Fills shards, given first, from unsharded 1-D tensors, given second, which it may overwrite."""


class Transport(Protocol):
    """The part of a `Communicator` by which parameters are gathered and gradients reduced.

    Attributes:
        keeps_notes: Whether reductions hand on the notes of `Layout.note_used`.
        compresses_reductions: Whether gradients are sent in fewer bytes, unlike with a communication hook.
        positions: Log of the ranks that have all issued a gather which is over; None for a rank alone.
    """

    keeps_notes: bool
    compresses_reductions: bool
    positions: GroupPositions | None

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending: ...

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending: ...


class InReduction(Protocol):
    """A reduction in flight, of one unit or of a batch.

    Attributes:
        partial: Whether the sums are kept for the next reduction, which adds them.
    """

    partial: bool

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


class PostForwardShards:
    """A unit's full parameters, cut evenly between few ranks, which keep them from forward to backward."""

    def __init__(self, segments: list[Segment], within: Communicator) -> None:
        self._within = within
        self._parts = [within.own_part(segment.full.data).clone() for segment in segments]

    def gather(self, segments: list[Segment]) -> Pending:
        """Gathers them into the unsharded buffers."""
        full = [segment.full for segment in segments]

        def fill() -> None:
            for target, part in zip(full, self._parts):
                self._within.own_part(target.data).copy_(part)

        return self._within.gather_into(full, fill)


class NotedReduction:
    """A reduction that loses notes of used parameters (by a hook, encoded), and their sum beside it."""

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
        known = all(self._used)  # else the host waits to look at numbers
        used = iter(self._used if known else [count > 0 for count in self._counts.tolist()])
        for segment, shard in zip(self._segments, self._shards):
            by_any = [next(used) for _ in segment.leaves]
            segment.layout.note_in_shard(shard, by_any)


class Reduction:
    """A reduction in flight: first over the ranks of one copy, then over the replicas.

    Args:
        segments: Owners of the gradients.
        shards: The reduced shard of each.
        pending: The sum within the copy.
        replicas: Ranks of the second sum; None to keep the first one for the next reduction.
        summed: Tensors for the second sum, of which the shards are views; None for the shards.
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
        try:
            if self._in_copy:
                self._pending.wait()
                self._leave_copy()
            if self._over_replicas is not None:
                self._over_replicas.wait()
        except BaseException:
            leave_buffers(self._segments)
            raise
        for segment, shard in zip(self._segments, self._shards):
            if self._replicas is None:
                segment.gradients.keep_partial(shard)
            else:
                segment.gradients.add_reduced(shard)

    def abandon(self) -> None:
        """Waits, and drops the gradients."""
        try:
            self._pending.wait()
            if self._over_replicas is not None:
                self._over_replicas.wait()
        except BaseException:
            leave_buffers(self._segments)
            raise
        for segment in self._segments:
            segment.gradients.drop()


def leave_buffers(segments: Sequence[Segment]) -> None:
    """Leaves the reduce buffers to a reduction that has failed here: peers may read them still."""
    for segment in segments:
        segment.gradients.leave()


class BatchedGather:
    """One gather for several units, in one buffer of bytes.

    Each unit copies its share to its own buffers when it waits, and the last one frees the buffer.
    """

    @torch.inference_mode(False)
    def __init__(self, communicator: Communicator, units: Sequence[Sequence[Segment]]) -> None:
        self._communicator = communicator
        ranks = communicator.size
        self._buffer = communicator.buffer(
            ranks * sum(segment.batched_nbytes for segments in units for segment in segments), torch.uint8
        )
        parts = self._buffer.data.view(ranks, -1)
        self._own: list[torch.Tensor] = []
        self._shares: list[GatherShare] = []
        begin = 0
        for segments in units:
            rows = []
            for segment in segments:
                nbytes = segment.gathered.nbytes // ranks
                rows.append(parts[:, begin : begin + nbytes].view(segment.dtypes.param))
                self._own.append(rows[-1][communicator.rank])
                begin += segment.batched_nbytes
            self._shares.append(GatherShare(self, rows))
        self._buffer.free()
        self.pending: Pending | None = None  # from issue to the first wait
        self.waiting = set[GatherShare]()

    def issue(self, units: Sequence[Sequence[Segment]]) -> list[GatherShare]:
        """Issues the gather for units with segments of the same sizes and dtypes; returns their shares."""
        for share, segments in zip(self._shares, units):
            share.segments = segments
        shards = [segment.shard for segment in chain.from_iterable(units)]
        self.pending = self._communicator.gather_into(
            [self._buffer], lambda: foreach_copy_(self._own, shards, non_blocking=True)
        )
        self.waiting.update(self._shares)
        return self._shares

    def free(self) -> None:
        """Frees the buffer, when all units have copied their shares."""
        self._buffer.free()


class GatherShare:
    """One unit's share of a batched gather, for which it waits (a `Pending`).

    Args:
        gather: The batch.
        shards: For each segment, the gathered shards: ranks x elements.
    """

    def __init__(self, gather: BatchedGather, shards: list[torch.Tensor]) -> None:
        self._gather, self._shards = gather, shards
        self.segments: Sequence[Segment] = ()  # from issue to wait
        self._full: list[Buffer] = []  # the targets of the copies
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def wait(self) -> None:
        """Waits for the gather, and fills the unsharded buffers."""
        gather, full = self._gather, [*map(_FULL, self.segments)]
        if gather.pending is not None:
            gather.pending.wait()
            gather.pending = None
        for buffer in full:
            buffer.allocate()
        if full != self._full:
            self._full, self._copies = full, self._find_copies()
        foreach_copy_(*self._copies)
        self.segments = ()
        gather.waiting.discard(self)
        if not gather.waiting:
            gather.free()

    @torch.inference_mode(False)
    def _find_copies(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for segment, shards in zip(self.segments, self._shards):
            layout, full = segment.layout, segment.full.data
            one = layout.in_place
            pairs += [(shards, full.view(len(shards), -1))] if one else layout.same_elements(shards, full)
        return [target for _, target in pairs], [source for source, _ in pairs]


class BatchedGradients:
    """One buffer for the gradients of several units, in one dtype; parts of a rank lie side by side.

    Attributes:
        of_segments: The place of each segment.
        in_flight: Whether a reduction was issued and is not known to be over, so that peers may read them.
    """

    in_flight = False

    @torch.inference_mode(False)
    def __init__(self, communicator: Communicator, segments: Sequence[Segment]) -> None:
        self._communicator = communicator
        self.dtype, self._sums = segments[0].gradients.buffer_dtype, segments[0].dtypes.reduce
        step = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        self._ranges: list[slice] = []  # of each segment, in the part of a rank
        numel = 0
        for segment in segments:
            self._ranges.append(slice(numel, numel + segment.layout.shard_numel))
            numel = round_up(self._ranges[-1].stop, step)
        self._buffer = communicator.buffer(numel * communicator.size, self.dtype)
        self._parts = self._buffer.data.view(communicator.size, -1)
        self.of_segments: list[BatchPlace] = []
        for segment, span in zip(segments, self._ranges):
            layout, parts = segment.layout, self._parts[:, span]
            rows = layout.packs_rows and segment.params.distributed is None  # else other sums may follow
            self.of_segments.append((parts, layout.packer(parts) if rows else None))
        starts = [*(span.start for span in self._ranges[1:]), numel]
        gaps = [self._parts[:, span.stop : start] for span, start in zip(self._ranges, starts)]
        self._gaps = [gap for gap in gaps if gap.numel()]
        self._buffer.free()

    def allocate(self) -> None:
        """Gets memory for gradients, which move to `of_segments` then."""
        self._buffer.allocate()
        for gap in self._gaps:
            gap.zero_()

    def reduce(self, taken: Sequence[int]) -> tuple[Pending, torch.Tensor, list[torch.Tensor]]:
        """Issues the reduction of some segments, given by number.

        Returns:
            (pending, reduced shard, one view of it per segment)
        """
        for index, (parts, _) in enumerate(self.of_segments):
            if index not in taken:  # may hold NaN, which checks of collectives refuse
                parts.zero_()
        shard = self._communicator.empty(self._parts.shape[1], self._sums)
        self.in_flight = True
        pending = self._communicator.reduce_scatter([shard], [self._buffer.data])
        # Each with a version counter of its own, as if it had been reduced alone.
        return pending, shard, [shard[self._ranges[index]].data for index in taken]

    def free(self) -> None:
        """Frees the buffer; a reduction that was issued must be over."""
        self.in_flight = False
        self._buffer.free()
