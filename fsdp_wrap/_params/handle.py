"""`ParamHandle`: the storage and the communication of one unit.

SHARDED --gather--> GATHERING --wait--> FULL --reshard--> SHARDED. Resharding is always safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import (
    Communicator,
    Finished,
    FromHost,
    GroupMemory,
    Pending,
)
from fsdp_wrap._core import (
    PlugIns,
    SegmentDtypes,
    SegmentPolicy,
    everywhere,
    format_dtype,
    segment_dtypes,
    steps_taken,
)
from fsdp_wrap._params.collectives import (
    GatherShare,
    PostForwardShards,
    Transport,
)
from fsdp_wrap._params.extensions import ExtensionSegment, GatherUses
from fsdp_wrap._params.parallel import HeldBy
from fsdp_wrap._params.segment import Segment
from fsdp_wrap._params.sharded_params import ShardedParams, Written
from fsdp_wrap._params.showing import UnitDisplay
from fsdp_wrap._params.side_data import refuse_other_codes, refuse_training
from fsdp_wrap._params.state import MOVES, Until, Where
from fsdp_wrap._params.summoned import NOTHING_LENT, LentParams
from fsdp_wrap._params.unit_gradients import UnitGradients

_NOTHING = Finished()
_REQUIRES_GRAD, _WRITTEN = attrgetter("requires_grad"), methodcaller("written")


def trains(sharded: ShardedParams) -> bool:
    """Whether any of a segment's parameters needs a gradient now."""
    return any(map(_REQUIRES_GRAD, sharded.sources))


class ParamHandle:
    """Owner of one unit's memory and communication.

    Args:
        params: Of each segment, this rank's shard and the sharded parameters.
        communicator: The ranks that hold one copy of the unit between them.
        replicas: The ranks that hold the same part of other copies.
        policies: Dtypes of each segment.
        held_by: The ranks of `communicator`, as saved tensors refer to them.

    Attributes:
        where: Where the full parameters are.
        stays: How long they stay, while they are in memory.
        lent: What the modules show to the user, while they are lent.
        generation: Count of times that leaves were made anew; older graphs cannot run backward.
        hookings: Count of times that leaves or sharded parameters became others, without hooks.
        values: Count of times that the leaves got new values; a graph needs its forward's values.
        written: The last versions of the sharded parameters, by segment; see `ShardedParams.written`.
        transport: Gathers parameters and reduces gradients in training.
        post_forward_shards: Source of the next gather, where fewer ranks keep the full parameters.
        bulky: Whether one leaf's gradient alone takes half of a segment's memory.
        sizeable: Whether one takes a quarter of it.
        extended: Segments of tensor subclasses that give what is gathered.
        in_full: Whether the unit computes in the master dtype, whatever its policies say.
        gradients: The unit's gradients, and their reductions.
        plug_ins: What is attached to the unit, to its steps and to all steps.
    """

    def __init__(
        self,
        params: Sequence[ShardedParams],
        communicator: Communicator,
        replicas: Communicator,
        policies: Sequence[SegmentPolicy],
        held_by: HeldBy,
    ) -> None:
        self.communicator, self.replicas, self.held_by = communicator, replicas, held_by
        self.plug_ins = PlugIns(everywhere)
        self.transport: Transport = communicator
        self._transport_of: Callable[[ParamHandle], Transport] = attrgetter("communicator")
        self._policies, self.keeps_storage = policies, False
        self.params = params
        self._trained = [*map(trains, params)]
        self.in_full = False
        self.segments = [*map(self._segment, params, self._dtypes(self.in_full))]
        self.gradients = UnitGradients(self.segments, communicator, replicas, self.plug_ins)
        self._note_contents()
        if self.extended:
            self.plug_ins.attach(GatherUses())
        self.where, self.stays = Where.SHARDED, Until.NOW
        self.shown = UnitDisplay(self.segments)
        self.lent = NOTHING_LENT
        self.generation = self.hookings = self.values = 0
        self._gathering: Pending = _NOTHING
        self._in_place = False  # whether the gather fills the unsharded buffers themselves
        self.post_forward_shards: PostForwardShards | None = None
        self.written = [*map(_WRITTEN, params)]
        self._changed = False  # whether the values are others than at the last `wait`
        self._steps_at_gather = 0  # of all optimizers

    def with_params(self, params: Sequence[ShardedParams]) -> ParamHandle:
        """Returns a handle of other parameters, otherwise like this one."""
        handle = ParamHandle(params, self.communicator, self.replicas, self._policies, self.held_by)
        handle.set_transport(self._transport_of)
        handle.gradients.reduce_like(self.gradients)
        handle.keep_storage(self.keeps_storage)
        for plug_in in self.plug_ins.own:
            if plug_in.copied:
                handle.plug_ins.attach(plug_in)
        return handle

    def set_transport(self, transport_of: Callable[[ParamHandle], Transport]) -> None:
        """Changes the transport of training, made for a handle; full parameters for users come as before."""
        if self.staged:
            raise RuntimeError(
                f"state_over_replicas=True decides how '{self.params[0].layout.fqns[0]}', and what is beside "
                "it in its unit, is gathered and reduced: shard without it"
            )
        self.transport = self.gradients.transport = transport_of(self)
        self._transport_of = transport_of

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The ranks that share a copy of the parameters, and those with other copies."""
        return self.communicator, self.replicas

    @property
    def staged(self) -> bool:
        """Whether gathers and reductions take two stages, of which the second is among fewer ranks."""
        return self.transport.positions is not self.communicator.positions

    def _dtypes(self, in_full: bool) -> list[SegmentDtypes]:
        if in_full:
            return [SegmentDtypes.full(sharded.dtype) for sharded in self.params]
        masters = (sharded.dtype for sharded in self.params)
        return segment_dtypes([*zip(masters, self._policies, self._trained)])

    def _segment(self, sharded: ShardedParams, dtypes: SegmentDtypes) -> Segment:
        kind: Callable[..., Segment] = ExtensionSegment if sharded.extended else Segment
        segment = kind(sharded, dtypes, self.communicator, self.plug_ins)
        if self.keeps_storage:
            segment.keep_memory(True)
        return segment

    def _note_contents(self) -> None:
        self.extended = [segment for segment in self.segments if isinstance(segment, ExtensionSegment)]
        self.unsharded_nbytes = sum(segment.full.nbytes for segment in self.segments)
        self.batch_nbytes = self.communicator.size * sum(segment.batched_nbytes for segment in self.segments)
        self.without_values = [fqn for sharded in self.params for fqn in sharded.without_values]
        self.trainable = any(segment.trainable for segment in self.segments)
        trained = [segment.gradients for segment in self.segments if segment.trainable]
        self.bulky = any(gradients.bulky for gradients in trained)
        self.sizeable = any(gradients.sizeable for gradients in trained)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is part of an unsharded buffer."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()._cdata
        for segment in self.segments:
            if storage in segment.full.storages:
                return True
        return False

    @property
    def distributed(self) -> list[str]:
        """Names, within the unit, of parameters that were distributed before they were sharded."""
        return [
            fqn
            for sharded in self.params
            for fqn, part in zip(sharded.layout.fqns, sharded.distributed or ())
            if part is not None
        ]

    @property
    def from_host(self) -> list[FromHost]:
        """Copiers of shards in host memory to the device."""
        return [segment.from_host for segment in self.segments if segment.from_host is not None]

    def nbytes_by_dtype(self) -> dict[str, int]:
        """Returns the bytes of the full parameters, by the dtype in which they travel."""
        nbytes = Counter[torch.dtype]()
        for segment in self.segments:
            nbytes += segment.nbytes_by_dtype
        return {format_dtype(dtype): count for dtype, count in nbytes.items()}

    # parameters

    def gather(self, batch: GatherShare | None = None) -> None:
        """Issues the all-gather of a sharded unit.

        Args:
            batch: The unit's share of a gather that was issued for several units; none is issued then.
        """
        self._steps_at_gather = steps_taken()
        self.look()
        segments = self.segments
        self._in_place = batch is not None or self.post_forward_shards is not None
        if batch is not None:
            self._gathering = batch
        elif self.post_forward_shards is not None:
            self._gathering = self.post_forward_shards.gather(segments)
        else:
            buffers = [segment.gathered for segment in segments]
            self._gathering = self.transport.gather_into(buffers, self._write_shards)
        assert (self.where, Where.GATHERING) in MOVES
        self.where = Where.GATHERING

    def _write_shards(self) -> None:
        for segment in self.segments:
            segment.write_shard()

    def follow_subclasses(self, made_anew: bool) -> None:
        """Notes what tensor subclasses give to be gathered next; the first time, they make leaves anew."""
        self.generation += made_anew
        self.hookings += made_anew
        self._note_contents()

    @property
    def can_be_batched(self) -> bool:
        """Whether the communicator alone gathers and reduces: batches with other units are possible."""
        if self.transport is not self.communicator or self.gradients.has_own_reduction or self.keeps_storage:
            return False
        return not self.extended and not any(segment.params.offloaded for segment in self.segments)

    def look(self) -> bool:
        """Notices writes to the sharded parameters since the last look; returns whether there were any."""
        written = [*map(_WRITTEN, self.params)]
        changed = written != self.written
        if changed:
            self._change_values(written)
        return changed

    def _change_values(self, written: list[Written]) -> None:
        self.written, self._changed = written, True
        self.values += 1
        for segment in self.segments:
            if segment.from_host is not None:
                segment.from_host.outdate()

    @property
    def is_current(self) -> bool:
        """Whether full parameters are there, or coming, with the values of the shards."""
        unsharded = self.where in (Where.GATHERING, Where.FULL)
        if not unsharded or not self.shown.untouched:
            return False
        # Not all optimizers move version counters: a step counts as a change of what trains.
        if self._steps_at_gather != steps_taken() and any(map(trains, self.params)):
            return False
        return self.written == [*map(_WRITTEN, self.params)]

    def wait(self) -> None:
        """Waits for the gather in flight: the leaves are usable afterwards."""
        self._gathering.wait()
        self._gathering = _NOTHING
        for segment in self.segments:
            segment.admit(self._changed, in_place=self._in_place)
        self._changed, self.post_forward_shards = False, None
        assert (self.where, Where.FULL) in MOVES
        self.where = Where.FULL

    def reshard(self, within: Communicator | None = None) -> bool:
        """Frees the full parameters; returns False if there were none.

        Args:
            within: Ranks that keep the full parameters between them, for the next gather.
        """
        if self.where is Where.GATHERING:
            self.wait()  # a gather in flight still writes
        self.post_forward_shards = None
        if self.where is not Where.FULL:
            return False
        self.shown.show_sharded()
        parts_can_be_kept = not self.keeps_storage and not self.extended  # a gather may exchange buffers
        if within is not None and parts_can_be_kept:
            self.post_forward_shards = PostForwardShards(self.segments, within)
        for segment in self.segments:
            segment.free()
        self.where, self.stays = Where.SHARDED, Until.NOW
        return True

    def stay(self, until: Until) -> None:
        """Keeps full parameters that nothing computes with for now; shows those that wait for a backward."""
        self.stays = until
        if until is Until.BACKWARD:
            self.shown.show_kept()
        else:
            self.shown.show_sharded()

    @property
    def holds_changes(self) -> bool:
        """Whether the full parameters were edited, or gradients lie in their place."""
        return bool(self.shown.changed) or any([segment.holds_changes for segment in self.segments])

    # changes

    def keep_storage(self, keep: bool) -> None:
        """Decides whether the unsharded buffers keep their memory while the unit is sharded."""
        self.keeps_storage = keep
        for segment in self.segments:
            segment.keep_memory(keep)
            if self.where is Where.SHARDED:
                segment.free()

    def follow_replaced(self) -> None:
        """Takes over data that the user has put into a sharded unit's parameters, also of another dtype."""
        assert self.where is Where.SHARDED
        moved = False
        for segment in self.segments:
            if segment.gradients.kept or segment.gradients.partial is not None:
                segment.refuse_conversion()
            if segment.params.follow_replaced():
                refuse_other_codes(segment.params.side_data, segment.params.dtype, segment.params.name_of)
                segment.follow_shard()
                moved = True
        if moved:
            self._make_segments()

    @property
    def mixes(self) -> bool:
        """Whether its policies ask for another dtype than the master dtype."""
        return any(dtypes.mixed for dtypes in self._dtypes(in_full=False))

    def compute_in_full(self, in_full: bool) -> None:
        """Switches a sharded unit between its master dtype and the dtypes of its policies."""
        assert self.where is Where.SHARDED and not self.gradients.accumulated
        self.in_full = in_full
        self._make_segments()

    def allocate_in(self, memory: GroupMemory | None) -> None:
        """Moves a sharded unit's buffers to other memory; None for ordinary memory."""
        assert self.where is Where.SHARDED and not self.gradients.accumulated
        if memory is not self.communicator.memory:
            self.communicator.allocate_in(memory)
            self._make_segments(anew=True)

    def _make_segments(self, anew: bool = False) -> None:
        """Makes the segments whose dtypes have changed anew, or all of them."""
        self.values += 1
        self._changed = True
        self.hookings += 1
        for index, (segment, dtypes) in enumerate(zip(self.segments, self._dtypes(self.in_full))):
            if anew or dtypes != segment.dtypes:
                self.segments[index] = self._segment(segment.params, dtypes)
                self.generation += 1
        self.gradients.divide_by(self.gradients.contributors)
        self._note_contents()

    @property
    def flat_param(self) -> nn.Parameter:
        """The shard that clients look at: of several, one that trains in the lowest precision."""
        params = [sharded.flat_param for sharded in self.params]
        return min(params, key=lambda param: (not param.requires_grad, param.itemsize))

    def become_sharded(self) -> bool:
        """Reshards and takes over replaced data; returns False if something else is shown to the user."""
        self.reshard()
        if self.where is not Where.SHARDED:
            return False
        self.follow_replaced()
        return True

    # in the user's hands

    def lend(self, lent: LentParams) -> None:
        """Leaves a sharded unit's modules to what is shown to the user."""
        assert (self.where, Where.LENT) in MOVES
        self.where, self.lent = Where.LENT, lent

    def take_back(self, writeback: bool = False) -> None:
        """Ends `lend`; `writeback` writes noted edits to the shards, and is collective."""
        lent, self.lent = self.lent, NOTHING_LENT
        for sharded in self.params:
            sharded.hide_full()
        assert self.where in (Where.LENT, Where.SHARDED)  # the latter where lending has failed
        self.where = Where.SHARDED
        lent.end(writeback)

    # gradients

    def follow_requires_grad(self) -> bool:
        """Copies `requires_grad` from sharded parameters to leaves; returns whether any has changed."""
        changed = False
        for segment in self.segments:
            wanted = [*map(_REQUIRES_GRAD, segment.params.sources)]
            if wanted != [*map(_REQUIRES_GRAD, segment.leaves)]:
                refuse_training(segment.params.side_data, wanted, segment.params.name_of)
                segment.train(wanted)
                changed = True
        if changed:
            self._note_contents()
        return changed

    def abandon_backward(self) -> None:
        """Drops the remains of a failed backward: work in flight, gradients on leaves, partial sums."""
        self.gradients.abandon_reduction()
        if self.gradients.in_place:
            self.reshard()
        self.gradients.drop_failed()


class EmptyHandle(ParamHandle):
    """The handle of a unit without parameters: nothing is gathered, freed or reduced, and all is there."""

    communicators = ()

    def __init__(self) -> None:
        alone = Communicator(0, 1, torch.device("cpu"))
        super().__init__((), alone, alone, (), HeldBy((), "cpu"))
        self.where = Where.FULL

    def with_params(self, params: Sequence[ShardedParams]) -> ParamHandle:
        """Returns another empty handle."""
        return EmptyHandle()

    def set_transport(self, transport_of: Callable[[ParamHandle], Transport]) -> None:
        """Does nothing: nothing travels."""

    def compute_in_full(self, in_full: bool) -> None:
        """Notes the precision, in which modules without parameters compute, too."""
        self.in_full = in_full

    def reshard(self, within: Communicator | None = None) -> bool:
        """Returns False: there is nothing to free."""
        return False
