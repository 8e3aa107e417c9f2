"""`ParamHandle`: the storage and the communication of one unit.

SHARDED --unshard--> UNSHARDING --wait--> UNSHARDED --reshard--> SHARDED. Resharding is always safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from operator import attrgetter, methodcaller

import torch
from torch import nn

from fsdp_wrap._comm import Communicator, Finished, Pending
from fsdp_wrap._core import SegmentDtypes, SegmentPolicy, segment_dtypes, steps_taken
from fsdp_wrap._params.display import Showing, UnitDisplay
from fsdp_wrap._params.held_by import HeldBy
from fsdp_wrap._params.in_flight import KeptParameters, NotedReduction, ReduceScatter, Reduction, Transport
from fsdp_wrap._params.layout import Layout, Written
from fsdp_wrap._params.segment import Segment
from fsdp_wrap._params.summoned import SummonedSegment, Summoning

_NOTHING = Finished()
_GATHERED, _REQUIRES_GRAD = attrgetter("gathered"), attrgetter("requires_grad")
_WRITTEN = methodcaller("written")


class HandleState(Enum):
    """What is in memory.

    Attributes:
        SHARDED: Shards only.
        UNSHARDING: Unsharded buffers are allocated and being filled.
        UNSHARDED: Unsharded buffers are filled; leaves may be used.
        SUMMONED: As UNSHARDED, but the parameters are in the user's hands: no forward, no backward.
        REPLACED: As SHARDED, but the modules show what a state dict is to contain or to load into.
    """

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    SUMMONED = "summoned"
    REPLACED = "replaced"


class ParamHandle:
    """Owns what one unit keeps in memory and communicates.

    Args:
        layouts: One per segment.
        communicator: Of the ranks that hold one copy of the unit between them.
        replicas: Of the ranks that hold the same part of other copies.
        policies: Dtypes of each layout.
        held_by: The ranks that hold one copy of the unit between them, for what is saved of it.

    Attributes:
        state: What is in memory.
        layouts: How the parameters lie in buffers, by segment.
        unsharded_nbytes: Bytes of the unsharded buffers when they are allocated.
        generation: How often the leaves were made anew; a graph with older ones cannot run backward.
        transport: How parameters and gradients travel in training.
        without_values: Names, within the unit, of the parameters that are on the meta device still.
        trainable: Whether any parameter of the unit needs a gradient now.
        reduction: What was issued and not finished.
        has_own_reduction: Whether `reduce_by` was called.
        keeps_gradients: Whether a backward since the last reduction has left any (`no_sync`).
        in_full: Whether it computes in the master dtype, whatever its policies say.
        bulky: Whether the first gradient that arrives may take as much memory as all that would follow.
        kept: What the next `unshard` gathers from, if other ranks than usual keep the full parameters.
        values: How often the leaves have got other values; a graph needs those that they had in its forward.
        written: What the layouts said when `look` asked them last, by segment.
        shown: What the modules show in training.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        communicator: Communicator,
        replicas: Communicator,
        policies: Sequence[SegmentPolicy],
        held_by: HeldBy,
    ) -> None:
        self.communicator = communicator
        self.held_by = held_by
        self.replicas = replicas
        self.transport: Transport = communicator
        self._policies, self._keeps_storage = policies, False
        self.layouts = layouts
        self._trained = [any(map(_REQUIRES_GRAD, layout.sources)) for layout in layouts]
        self.in_full = False
        self._contributors: float = communicator.size * replicas.size
        self.segments = [*map(self._segment, layouts, self._dtypes())]
        self._note_contents()
        self.state = HandleState.SHARDED
        self.generation = 0
        self._gathering: Pending = _NOTHING
        self.kept: KeptParameters | None = None
        self.values = 0
        self.written = [*map(_WRITTEN, layouts)]
        self._changed = False
        self._lasting_since = -1
        self.reduction: Reduction | None = None
        self.has_own_reduction = False
        self.keeps_gradients = False
        self._reduce_scatter: ReduceScatter | None = None
        self._summing = replicas
        self._summoned: list[SummonedSegment] = []
        self.shown = UnitDisplay(self.segments)

    def with_layouts(self, layouts: Sequence[Layout]) -> ParamHandle:
        """Returns a handle of other layouts, otherwise like this one."""
        handle = ParamHandle(layouts, self.communicator, self.replicas, self._policies, self.held_by)
        handle.travel_by(self.transport)
        handle.keep_storage(self._keeps_storage)
        if self._reduce_scatter is not None:
            handle.reduce_by(self._reduce_scatter, self._summing)
        return handle

    def travel_by(self, transport: Transport) -> None:
        """Lets parameters and gradients travel another way from now on; what users are shown does not."""
        self.transport = transport

    def _dtypes(self) -> list[SegmentDtypes]:
        if self.in_full:
            return [SegmentDtypes.full(layout.dtype) for layout in self.layouts]
        return self._mixed_dtypes()

    def _mixed_dtypes(self) -> list[SegmentDtypes]:
        masters = (layout.dtype for layout in self.layouts)
        return segment_dtypes([*zip(masters, self._policies, self._trained)])

    def _segment(self, layout: Layout, dtypes: SegmentDtypes) -> Segment:
        segment = Segment(layout, dtypes, self.communicator, self._contributors)
        segment.keep_memory(self._keeps_storage)
        return segment

    def _note_contents(self) -> None:
        self.unsharded_nbytes = sum(segment.full.nbytes for segment in self.segments)
        self.without_values = [fqn for layout in self.layouts for fqn in layout.without_values]
        self.trainable = any(segment.trainable for segment in self.segments)
        self.bulky = any(segment.trainable and segment.gradients.bulky for segment in self.segments)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is part of an unsharded buffer."""
        for segment in self.segments:
            if segment.full.holds(tensor):
                return True
        return False

    @property
    def shows_shards(self) -> bool:
        """Whether the modules show pieces of the original parameters."""
        shards = any(layout.resident is None for layout in self.layouts)
        in_full = self.shows_full or self.state is HandleState.REPLACED
        return shards and self.shown.state is Showing.SHARDED and not in_full

    @property
    def shows_full(self) -> bool:
        """Whether the modules show full parameters that are in the user's hands."""
        return bool(self._summoned) and all(segment.shows_full for segment in self._summoned)

    @property
    def holds_gradients(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        for segment in self.segments:
            if segment.gradients.collected and self.reduction is None:
                return True
            for leaf in segment.leaves:
                if leaf.grad is not None:
                    return True
        return False

    @property
    def lends(self) -> bool:
        """Whether gradients lie where the full parameters were."""
        return any(segment.gradients.buffer is segment.full for segment in self.segments)

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait unreduced for a later backward (`no_sync`)."""
        return any(segment.gradients.accumulated for segment in self.segments)

    # parameters

    def gather(self, lasting: bool = False) -> None:
        """Issues the all-gather of a sharded unit.

        Args:
            lasting: Whether `is_current` is to tell later if the shards have changed since.
        """
        self._lasting_since = steps_taken() if lasting else -1
        written = [*map(_WRITTEN, self.layouts)]  # as `look`, in a frame less
        if written != self.written:
            self._change_values(written)
        segments = self.segments
        if self.kept is not None:
            self._gathering = self.kept.gather(segments)
        else:
            fill = segments[0].write_shard if len(segments) == 1 else self._write_shards
            self._gathering = self.transport.gather_into([*map(_GATHERED, segments)], fill)
        self.state = HandleState.UNSHARDING

    def look(self) -> None:
        """Notices that the sharded parameters were written to since the last gather."""
        written = [*map(_WRITTEN, self.layouts)]
        if written != self.written:
            self._change_values(written)

    def _change_values(self, written: list[Written]) -> None:
        self.written, self._changed = written, True
        self.values += 1

    @property
    def is_current(self) -> bool:
        """Whether the unit is unsharded lastingly, or being so, with its shards as they are now."""
        unsharded = self.state in (HandleState.UNSHARDING, HandleState.UNSHARDED)
        if not unsharded or self._lasting_since != steps_taken() or not self.shown.untouched:
            return False
        return self.written == [*map(_WRITTEN, self.layouts)]

    def _write_shards(self) -> None:
        for segment in self.segments:
            segment.write_shard()

    def wait(self) -> None:
        """Waits for the gather in flight: makes the leaves usable by what the caller does next."""
        self._gathering.wait()
        self._gathering = _NOTHING
        for segment in self.segments:
            segment.admit(self._changed, in_place=self.kept is not None)
        self._changed, self.kept = False, None
        self.state = HandleState.UNSHARDED

    def reshard(self, within: Communicator | None = None) -> bool:
        """Frees the full parameters; returns False if the unit was sharded already.

        Args:
            within: Ranks that keep the full parameters between them, for the next `unshard` to gather from.
        """
        if self.state is HandleState.UNSHARDING:
            self.wait()  # a gather in flight still writes
        self.kept = None
        if self.state is not HandleState.UNSHARDED:
            return False
        if within is not None and not self._keeps_storage:  # which a gather from there may exchange
            self.kept = KeptParameters(self.segments, within)
        self.shown.show_sharded()
        for segment in self.segments:
            segment.free()
        self.state = HandleState.SHARDED
        return True

    def keep_storage(self, keep: bool) -> None:
        """Decides whether the unsharded buffers stay where they are while the unit is sharded."""
        self._keeps_storage = keep
        for segment in self.segments:
            segment.keep_memory(keep)
            if self.state is HandleState.SHARDED:
                segment.free()

    def follow_replaced(self) -> None:
        """Takes over data that the user has put in the place of a sharded unit's, also of another dtype.

        Raises:
            RuntimeError: If the dtype is another and gradients accumulated in the old one wait.
            ValueError: If they do not fit.
        """
        assert self.state is HandleState.SHARDED
        moved = False
        for segment in self.segments:
            if segment.gradients.kept:
                segment.refuse_conversion()
            if segment.layout.follow_replaced():
                segment.follow_shard()
                moved = True
        if moved:
            self._follow_dtypes()

    @property
    def mixes(self) -> bool:
        """Whether its policies let it compute or reduce in another than the master dtype."""
        return any(dtypes.mixed for dtypes in self._mixed_dtypes())

    def compute_in_full(self, in_full: bool) -> None:
        """Lets a sharded unit compute and reduce in its master dtype from now on, or as its policies say."""
        assert self.state is HandleState.SHARDED and not self.accumulates
        self.in_full = in_full
        self._follow_dtypes()

    def _follow_dtypes(self) -> None:
        """Makes segments anew that are to compute in others."""
        self.values += 1
        self._changed = True
        for index, (segment, dtypes) in enumerate(zip(self.segments, self._dtypes())):
            if dtypes != segment.dtypes:
                self.segments[index] = self._segment(segment.layout, dtypes)
                self.generation += 1
        self._note_contents()

    @property
    def flat_param(self) -> nn.Parameter:
        """The shard that a client may upcast: of several, one that trains in the lowest precision."""
        params = [layout.flat_param for layout in self.layouts]
        return min(params, key=lambda param: (not param.requires_grad, param.itemsize))

    def become_sharded(self) -> bool:
        """Reshards, and takes over replaced data; returns False if the modules show something else."""
        self.reshard()
        if self.state is not HandleState.SHARDED:
            return False
        self.follow_replaced()
        return True

    def summon(self, how: Summoning) -> None:
        """Puts the full parameters, in master dtype, into the user's hands; collective."""
        self.become_sharded()
        self._summoned = [
            SummonedSegment(layout, self.communicator, self.replicas, how) for layout in self.layouts
        ]
        self.state = HandleState.SUMMONED

    def take_edits(self, prefix: str) -> None:
        """Notes the summoned parameters that the modules show now; `prefix` is for messages.

        Raises:
            ValueError: If a parameter was replaced by one of another shape or dtype.
        """
        for segment in self._summoned:
            segment.take_edits(prefix)

    def dismiss(self, writeback: bool) -> None:
        """Takes the full parameters back; with `writeback`, which is collective, the noted edits are kept."""
        summoned, self._summoned = self._summoned, []
        for layout in self.layouts:
            layout.hide_full()
        self.state = HandleState.SHARDED
        for each in summoned:
            if writeback:
                each.write_back()
            each.leave()

    def replace(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        """Lets a sharded unit's modules show other parameters, given by segment."""
        for layout, shown in zip(self.layouts, params):
            layout.show_full(shown, copies=True)
        self.state = HandleState.REPLACED

    def end_replacement(self) -> None:
        """Lets the modules show the sharded parameters again."""
        for layout in self.layouts:
            layout.hide_full()
        self.state = HandleState.SHARDED

    # gradients

    def follow_requires_grad(self) -> bool:
        """Lets the leaves follow the sharded parameters' `requires_grad`; returns whether any changed."""
        changed = False
        for segment in self.segments:
            wanted = [*map(_REQUIRES_GRAD, segment.layout.sources)]
            if wanted != [*map(_REQUIRES_GRAD, segment.leaves)]:
                segment.train(wanted)
                changed = True
        if changed:
            self._note_contents()
        return changed

    def reduce_by(self, reduce_scatter: ReduceScatter, replicas: Communicator) -> None:
        """Replaces the reduction by one that averages over its ranks, not only sums.

        Args:
            reduce_scatter: Makes the shards; as `Communicator.reduce_scatter` otherwise.
            replicas: Those over which the shards are averaged afterwards.
        """
        self._reduce_scatter, self._summing = reduce_scatter, replicas
        self.has_own_reduction = True
        self._contributors = replicas.size
        for segment in self.segments:
            segment.gradients.average_over(self._contributors)

    def divide_gradients_by(self, factor: float) -> None:
        """Divides summed gradients by another number than that of the ranks."""
        self._contributors = factor
        for segment in self.segments:
            segment.gradients.average_over(factor)

    def take_in_place(self, leaf: nn.Parameter) -> None:
        """Moves a leaf's gradient to where the leaf lies, if that may serve as the reduce buffer.

        Raises:
            RuntimeError: If a gradient lies there already.
        """
        for segment in self.segments:
            if leaf in segment.places:
                segment.take_in_place(segment.places[leaf])

    def accumulate_gradients(self) -> None:
        """Moves the leaves' gradients into the reduce buffers, where more may be added before a reduction."""
        for segment in self.segments:
            segment.gradients.collect()

    def start_reduction(self, over_replicas: bool = True, counts_unused: bool = False) -> int:
        """Issues the reduce-scatter of every segment that holds gradients; returns the bytes concerned.

        Args:
            over_replicas: Whether the sum over the replicas follows; otherwise what was reduced so far waits
                for the next reduction of which it is part.
            counts_unused: Whether parameters that no rank used get gradients of zeros.
        """
        segments, full, shards, nbytes = [], [], [], 0
        for segment in self.segments:
            # Whether it takes part must not depend on which of its leaves this rank used.
            if segment.trainable or segment.gradients.collected:
                segments.append(segment)
                full.append(segment.gradients.complete(counts_unused))
                shards.append(self.communicator.empty(segment.layout.shard_numel, segment.dtypes.reduce))
                nbytes += full[-1].nbytes
        reduce_scatter = self._reduce_scatter or self.transport.reduce_scatter
        pending = reduce_scatter(shards, full)
        if self.has_own_reduction or not self.transport.keeps_notes:
            ranks = self.communicator if self.communicator.size > 1 else self.replicas
            pending = NotedReduction(segments, shards, pending, ranks)
        self.reduction = Reduction(segments, shards, pending, self._summing if over_replicas else None)
        return nbytes

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, and adds it to the sharded parameters' gradients."""
        assert self.reduction is not None
        reduction, self.reduction = self.reduction, None
        self.keeps_gradients = False
        reduction.finish()

    def keep_accumulated(self) -> None:
        """Keeps the gradients taken so far for a later backward (`no_sync`)."""
        for segment in self.segments:
            segment.gradients.keep_accumulated()
            self.keeps_gradients = self.keeps_gradients or segment.gradients.kept

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since."""
        for segment in self.segments if self.keeps_gradients else ():
            if segment.gradients.kept:
                segment.gradients.forget_zeroed()

    def drop_gradients(self) -> None:
        """Forgets all gradients that have not reached the sharded parameters."""
        for segment in self.segments:
            segment.gradients.drop_all()

    def abandon_backward(self) -> None:
        """Drops what a failed backward left: works in flight, gradients on leaves, partial sums."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.abandon()
        if self.lends:
            self.reshard()
        for segment in self.segments:
            segment.gradients.drop_failed()
