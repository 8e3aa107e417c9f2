"""`ParamHandle`: the storage and the communication of one unit.

SHARDED --unshard--> UNSHARDING --wait--> UNSHARDED --reshard--> SHARDED. Resharding is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator, Finished, FromHost, GroupMemory, Pending
from fsdp_wrap._core import SegmentDtypes, SegmentPolicy, segment_dtypes, steps_taken
from fsdp_wrap._params.collectives import (
    GatherShare,
    InReduction,
    KeptParameters,
    NotedReduction,
    ReduceScatter,
    Reduction,
    Transport,
    travelling_nbytes,
)
from fsdp_wrap._params.display import Showing, UnitDisplay
from fsdp_wrap._params.extensions import ExtensionSegment
from fsdp_wrap._params.held_by import HeldBy
from fsdp_wrap._params.layout import Layout, Written
from fsdp_wrap._params.segment import Segment
from fsdp_wrap._params.shown import Stay, trains
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
        travelling_nbytes: Bytes of what is gathered, where other units' is gathered with it.
        generation: How often the leaves were made anew; a graph with older ones cannot run backward.
        hookings: How often leaves or sharded parameters have become others, which have no hooks.
        transport: How parameters and gradients travel in training.
        without_values: Names, within the unit, of the parameters that are on the meta device still.
        trainable: Whether any parameter of the unit needs a gradient now.
        reduction: What was issued and not finished.
        has_own_reduction: Whether `reduce_by` was called.
        keeps_storage: Whether the unsharded buffers stay where they are while the unit is sharded.
        keeps_gradients: Whether a backward has left any that are not summed over all ranks yet.
        in_full: Whether it computes in the master dtype, whatever its policies say.
        bulky: Whether the first gradient that arrives may take as much memory as all that would follow.
        sizeable: Whether it may take a third of that.
        kept: What the next `unshard` gathers from, if other ranks than usual keep the full parameters.
        staying: Segments of a sharded unit whose full parameters this rank keeps: they are not gathered.
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
        self._policies, self.keeps_storage = policies, False
        self.layouts = layouts
        self._trained = [any(map(_REQUIRES_GRAD, layout.sources)) for layout in layouts]
        self.in_full = False
        self._contributors: float = communicator.size * replicas.size
        self.segments = [*map(self._segment, layouts, self._dtypes())]
        self._note_contents()
        self.state = HandleState.SHARDED
        self.generation = self.hookings = 0
        self._gathering: Pending = _NOTHING
        self._comes_in_place = False
        self.kept: KeptParameters | None = None
        self.staying: dict[Segment, Stay] = {}
        self.values = 0
        self.written = self._gathered = [*map(_WRITTEN, layouts)]
        self._changed = False
        self._lasting_since = -1
        self.reduction: InReduction | None = None
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
        handle.divide_gradients_by(self._contributors)
        handle.keep_storage(self.keeps_storage)
        if self._reduce_scatter is not None:
            handle.reduce_by(self._reduce_scatter, self._summing)
        return handle

    def travel_by(self, transport: Transport) -> None:
        """Lets parameters and gradients travel another way from now on; what users are shown does not."""
        self.free_staying()  # another way may round them otherwise
        self.transport = transport

    def _dtypes(self) -> list[SegmentDtypes]:
        if self.in_full:
            return [SegmentDtypes.full(layout.dtype) for layout in self.layouts]
        return self._mixed_dtypes()

    def _mixed_dtypes(self) -> list[SegmentDtypes]:
        masters = (layout.dtype for layout in self.layouts)
        return segment_dtypes([*zip(masters, self._policies, self._trained)])

    def _segment(self, layout: Layout, dtypes: SegmentDtypes) -> Segment:
        kind: Callable[..., Segment] = ExtensionSegment if layout.extended else Segment
        segment = kind(layout, dtypes, self.communicator, self._contributors)
        segment.keep_memory(self.keeps_storage)
        return segment

    def _note_contents(self) -> None:
        self._extended = [each for each in self.segments if isinstance(each, ExtensionSegment)]
        self.unsharded_nbytes = sum(segment.full.nbytes for segment in self.segments)
        self.travelling_nbytes = travelling_nbytes(self.segments, self.communicator.size)
        self.without_values = [fqn for layout in self.layouts for fqn in layout.without_values]
        self.trainable = any(segment.trainable for segment in self.segments)
        trained = [segment.gradients for segment in self.segments if segment.trainable]
        self.bulky = any(gradients.bulky for gradients in trained)
        self.sizeable = any(gradients.sizeable for gradients in trained)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is part of an unsharded buffer."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        for segment in self.segments:
            if segment.full.holds(tensor):
                return True
        return False

    @property
    def distributed(self) -> list[str]:
        """Names, within the unit, of the parameters of which a part is sharded."""
        return [
            fqn
            for layout in self.layouts
            for fqn, part in zip(layout.fqns, layout.distributed or ())
            if part is not None
        ]

    @property
    def from_host(self) -> list[FromHost]:
        """What sends the shards to the device that lie in host memory."""
        return [segment.from_host for segment in self.segments if segment.from_host is not None]

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
        """Whether gradients wait for a later backward, which sums them over all ranks (`no_sync`)."""
        return any(segment.gradients.accumulated for segment in self.segments)

    # parameters

    def gather(self, lasting: bool = False) -> None:
        """Issues the all-gather of a sharded unit, save for what has stayed; see `drop_outdated`.

        Args:
            lasting: Whether `is_current` is to tell later if the shards have changed since.
        """
        self._lasting_since = steps_taken() if lasting else -1
        written = [*map(_WRITTEN, self.layouts)]  # as `look`, in a frame less
        if written != self.written:
            self._change_values(written)
        self._gathered = written
        segments = self.segments
        self._comes_in_place = self.kept is not None
        if self.staying:
            segments = [segment for segment in segments if segment not in self.staying]
            self.staying = {}
        if self.kept is not None:
            self._gathering = self.kept.gather(segments)
        elif segments:
            if self._extended:
                self._prepare(segments)
            fill = segments[0].write_shard if len(segments) == 1 else partial(_write_shards, segments)
            self._gathering = self.transport.gather_into([*map(_GATHERED, segments)], fill)
        self.state = HandleState.UNSHARDING

    def _prepare(self, segments: Collection[Segment]) -> None:
        """Lets tensor subclasses say what travels of them."""
        anew = [each.prepare() for each in self._extended if each in segments]
        if True in anew:
            self.generation += 1
            self.hookings += 1
            self._note_contents()

    def ride(self, ride: GatherShare, lasting: bool = False) -> None:
        """Takes part in a gather that was issued for several units; see `gather`."""
        self._lasting_since = steps_taken() if lasting else -1
        written = [*map(_WRITTEN, self.layouts)]  # as above
        if written != self.written:
            self._change_values(written)
        self._gathered = written
        ride.begin(self.segments)
        self._gathering, self._comes_in_place = ride, True
        self.state = HandleState.UNSHARDING

    @property
    def travels_plainly(self) -> bool:
        """Whether nothing but the communicator decides how parameters and gradients travel, all at once."""
        if self.transport is not self.communicator or self.has_own_reduction or self.keeps_storage:
            return False
        if self._extended:
            return False
        return not any(segment.layout.offloaded for segment in self.segments)

    def look(self) -> None:
        """Notices that the sharded parameters were written to since the last gather."""
        written = [*map(_WRITTEN, self.layouts)]
        if written != self.written:
            self._change_values(written)

    def _change_values(self, written: list[Written]) -> None:
        self.written, self._changed = written, True
        self.values += 1
        for segment in self.segments:
            if segment.from_host is not None:
                segment.from_host.outdate()

    @property
    def is_outdated(self) -> bool:
        """Whether the sharded parameters were written to since the last gather."""
        return self.written != [*map(_WRITTEN, self.layouts)]

    @property
    def is_current(self) -> bool:
        """Whether the unit is unsharded lastingly, or being so, with its shards as they are now."""
        unsharded = self.state in (HandleState.UNSHARDING, HandleState.UNSHARDED)
        if not unsharded or self._lasting_since < 0 or not self.shown.untouched:
            return False
        if self._lasting_since != steps_taken() and any(map(trains, self.layouts)):
            return False
        return self.written == [*map(_WRITTEN, self.layouts)]

    @property
    def staying_nbytes(self) -> int:
        """Bytes of the unsharded buffers that stay while the unit is sharded."""
        return sum(segment.full.nbytes for segment in self.staying)

    @property
    def left(self) -> tuple[int, ...]:
        """The numbers of the segments that have not stayed."""
        return tuple(n for n, segment in enumerate(self.segments) if segment not in self.staying)

    def drop_outdated(self) -> int:
        """Frees what has stayed and may not be what the shards are now; returns how many bytes."""
        before, stepped = self.staying_nbytes, self._lasting_since != steps_taken()
        for segment in [*self.staying]:
            if self.staying[segment].is_outdated(segment.layout.written(), stepped):
                del self.staying[segment]
                segment.free()
                self.kept = None  # of the same values, and of the others alone
        return before - self.staying_nbytes

    def free_staying(self, but: Collection[Segment] = ()) -> None:
        """Frees what has stayed, but for some segments."""
        for segment in [*self.staying]:
            if segment not in but:
                del self.staying[segment]
                segment.free()
                self.kept = None  # which has what did not stay alone

    def wait(self) -> None:
        """Waits for the gather in flight: makes the leaves usable by what the caller does next."""
        self._gathering.wait()
        self._gathering = _NOTHING
        for segment in self.segments:
            segment.admit(self._changed, in_place=self._comes_in_place)
        self._changed, self.kept = False, None
        self.state = HandleState.UNSHARDED

    def reshard(self, within: Communicator | None = None, stays: Collection[Segment] = ()) -> bool:
        """Frees the full parameters; returns False if the unit was sharded already.

        Args:
            within: Ranks that keep the full parameters between them, for the next `unshard` to gather from.
            stays: Segments whose full parameters this rank keeps, where they are what was gathered.
        """
        if self.state is HandleState.UNSHARDING:
            self.wait()  # a gather in flight still writes
        self.kept = None
        if self.staying:
            self.free_staying(but=stays)
        if self.state is not HandleState.UNSHARDED:
            return False
        self.shown.show_sharded()
        if stays:
            self._let_stay(stays)
        leaving = [each for each in self.segments if each not in self.staying] if stays else self.segments
        parts_can_be_kept = not self.keeps_storage and not self._extended  # which a gather there may exchange
        if within is not None and leaving and parts_can_be_kept:
            self.kept = KeptParameters(leaving, within)
        for segment in leaving:
            segment.free()
        self.state = HandleState.SHARDED
        return True

    def _let_stay(self, wanted: Collection[Segment]) -> None:
        changed = self.shown.changed or self.written != self._gathered
        for segment, written in zip(self.segments, self._gathered):
            if segment in wanted and not changed and segment.rest():
                self.staying[segment] = Stay(segment.layout, written)

    def keep_storage(self, keep: bool) -> None:
        """Decides whether the unsharded buffers stay where they are while the unit is sharded."""
        self.free_staying()
        self.keeps_storage = keep
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
            if segment.gradients.kept or segment.gradients.partial is not None:
                segment.refuse_conversion()
            if segment.layout.follow_replaced():
                segment.follow_shard()
                moved = True
        if moved:
            self._make_segments()

    @property
    def shows_one_kind(self) -> bool:
        """Whether what modules show of a segment has one dtype, and all of it values, or nothing of it."""
        for segment in self.segments:
            firsts = [next(iter(places)) for places in segment.layout.places]
            shown = [module._parameters.get(name) for module, name in firsts]
            if len({(param.dtype, param.is_meta) for param in shown if param is not None}) != 1:
                return False
        return True

    @property
    def mixes(self) -> bool:
        """Whether its policies let it compute or reduce in another than the master dtype."""
        return any(dtypes.mixed for dtypes in self._mixed_dtypes())

    def compute_in_full(self, in_full: bool) -> None:
        """Lets a sharded unit compute and reduce in its master dtype from now on, or as its policies say."""
        assert self.state is HandleState.SHARDED and not self.accumulates
        self.in_full = in_full
        self._make_segments()

    def allocate_in(self, memory: GroupMemory | None) -> None:
        """Lets what travels of a sharded unit lie in other memory from now on; None for ordinary memory."""
        assert self.state is HandleState.SHARDED and not self.accumulates
        if memory is not self.communicator.memory:
            self.communicator.allocate_in(memory)
            self._make_segments(anew=True)

    def _make_segments(self, anew: bool = False) -> None:
        """Makes segments again whose dtypes are others now, or all of them."""
        self.free_staying()
        self.values += 1
        self._changed = True
        self.hookings += 1
        for index, (segment, dtypes) in enumerate(zip(self.segments, self._dtypes())):
            if anew or dtypes != segment.dtypes:
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
        for segment in self.segments:  # as in `reduced_segments`
            gradients = segment.gradients
            waits = gradients.collected or gradients.unreduced or gradients.partial is not None
            if segment.trainable or waits:
                segments.append(segment)
                full.append(segment.gradients.complete(counts_unused))
                shards.append(self.communicator.empty(segment.layout.shard_numel, segment.dtypes.reduce))
                nbytes += full[-1].nbytes
        reduce_scatter = self._reduce_scatter or self.transport.reduce_scatter
        pending = reduce_scatter(shards, full)
        if self.has_own_reduction or not self.transport.keeps_notes:
            ranks = self.communicator if self.communicator.size > 1 else self.replicas
            pending = NotedReduction(segments, shards, pending, ranks)
        at_once = over_replicas or self._summing.size == 1
        self.reduction = Reduction(segments, shards, pending, self._summing if at_once else None)
        return nbytes

    def reduced_segments(self) -> list[Segment]:
        """Returns the segments that take part in a reduction."""
        # Whether one does must not depend on which of its leaves this rank used.
        segments = []
        for segment in self.segments:
            gradients = segment.gradients
            waits = gradients.collected or gradients.unreduced or gradients.partial is not None
            if segment.trainable or waits:  # what was frozen since an earlier backward has gradients of that
                segments.append(segment)
        return segments

    def travelling_dtypes(self, reduced: bool) -> tuple[str, ...]:
        """Returns the names of the dtypes in which parameters travel, or gradients."""
        found = [each.gradients.travels_in if reduced else each.dtypes.param for each in self.segments]
        return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in found))

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the gradients that a reduction takes."""
        segments = self.reduced_segments()
        return sum(each.layout.numel * each.gradients.travels_in.itemsize for each in segments)

    def reduces_just(self, expected: Sequence[Segment], dtype: torch.dtype) -> bool:
        """Whether just these segments take part in a reduction, to which all contribute in one dtype."""
        segments = self.reduced_segments()
        return segments == expected and all(each.gradients.travels_in == dtype for each in segments)

    def join(self, reduction: InReduction) -> None:
        """Leaves the gradients to a reduction of several units."""
        self.reduction = reduction

    def leave_reduction(self, partial: bool = False) -> None:
        """Notes that nothing is left of a reduction, which hands on its result.

        Args:
            partial: Whether that is kept for the next one.
        """
        self.reduction = None
        self.keeps_gradients = partial

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, and adds it to the sharded parameters' gradients."""
        assert self.reduction is not None
        reduction, self.reduction = self.reduction, None
        self.keeps_gradients = reduction.partial
        reduction.finish()

    def keep_accumulated(self) -> None:
        """Keeps the gradients taken so far for a later backward (`no_sync`)."""
        for segment in self.segments:
            if segment.trainable:
                segment.gradients.keep_accumulated()
            self.keeps_gradients = self.keeps_gradients or segment.gradients.kept

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since."""
        for segment in self.segments if self.keeps_gradients else ():
            if segment.gradients.kept or segment.gradients.partial is not None:
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


def _write_shards(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.write_shard()
