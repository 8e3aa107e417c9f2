"""`Buffers`: the memory of one unit, and where its full parameters are.

SHARDED --gather--> GATHERING --wait--> FULL --reshard--> SHARDED. Resharding is always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller

import torch

from fsdp_wrap._comm import Communicator, Finished, GroupMemory, Pending
from fsdp_wrap._core import PlugIns, SegmentPolicy, everywhere, steps_taken
from fsdp_wrap._params.collectives import GatherShare, PostForwardShards, Transport
from fsdp_wrap._params.extensions import GatherUses
from fsdp_wrap._params.parallel import HeldBy
from fsdp_wrap._params.segments import Segments, trains
from fsdp_wrap._params.sharded_params import ShardedParams
from fsdp_wrap._params.showing import UnitDisplay
from fsdp_wrap._params.side_data import refuse_other_codes
from fsdp_wrap._params.state import MOVES, Until, Where
from fsdp_wrap._params.summoned import NOTHING_LENT, LentParams
from fsdp_wrap._params.unit_gradients import UnitGradients

_NOTHING = Finished()
_WRITTEN = methodcaller("written")


class Buffers:
    """Gathers and frees the full parameters of one unit, and knows where they are.

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
        values: Count of times that the leaves got new values; a graph needs its forward's values.
        written: The last versions of the sharded parameters, by segment; see `ShardedParams.written`.
        transport: Gathers parameters and reduces gradients in training.
        post_forward_shards: Source of the next gather, where fewer ranks keep the full parameters.
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
        self._transport_of: Callable[[Buffers], Transport] = attrgetter("communicator")
        self.params, self._policies = params, policies
        self.segments = Segments(params, policies, communicator, self.plug_ins)
        self.gradients = UnitGradients(self.segments, communicator, replicas, self.plug_ins)
        if self.segments.extended:
            self.plug_ins.attach(GatherUses())
        self.where, self.stays = Where.SHARDED, Until.NOW
        self.shown = UnitDisplay(self.segments)
        self.lent = NOTHING_LENT
        self.values = 0
        self._gathering: Pending = _NOTHING
        self._in_place = False  # whether the gather fills the unsharded buffers themselves
        self.post_forward_shards: PostForwardShards | None = None
        self.written = [*map(_WRITTEN, params)]
        self._changed = False  # whether the values are others than at the last `wait`
        self._steps_at_gather = 0  # of all optimizers

    def with_params(self, params: Sequence[ShardedParams]) -> Buffers:
        """Returns buffers of other parameters, otherwise like these."""
        buffers = Buffers(params, self.communicator, self.replicas, self._policies, self.held_by)
        buffers.set_transport(self._transport_of)
        buffers.gradients.reduce_like(self.gradients)
        buffers.keep_storage(self.segments.keeps_memory)
        for plug_in in self.plug_ins.own:
            if plug_in.copied:
                buffers.plug_ins.attach(plug_in)
        return buffers

    def set_transport(self, transport_of: Callable[[Buffers], Transport]) -> None:
        """Changes the transport of training, made for these buffers; what users see comes as before."""
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

    def look(self) -> bool:
        """Notices writes to the sharded parameters since the last look; returns whether there were any."""
        written = [*map(_WRITTEN, self.params)]
        changed = written != self.written
        if changed:
            self.written, self._changed = written, True
            self.values += 1
            for segment in self.segments:
                if segment.from_host is not None:
                    segment.from_host.outdate()
        return changed

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
        self.post_forward_shards, self.stays = None, Until.NOW
        if self.where is not Where.FULL:
            return False
        self.shown.show_sharded()
        segments = self.segments
        # A gather for tensor subclasses may exchange buffers.
        parts_can_be_kept = not segments.keeps_memory and not segments.extended
        if within is not None and parts_can_be_kept:
            self.post_forward_shards = PostForwardShards(segments, within)
        for segment in segments:
            segment.free()
        self.where = Where.SHARDED
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
        self.segments.keep_memory(keep)
        for segment in self.segments if self.where is Where.SHARDED else ():
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

    def compute_in_full(self, in_full: bool) -> None:
        """Switches a sharded unit between its master dtype and the dtypes of its policies."""
        assert self.where is Where.SHARDED and not self.gradients.accumulated
        self.segments.in_full = in_full
        self._make_segments()

    def allocate_in(self, memory: GroupMemory | None) -> None:
        """Moves a sharded unit's buffers to other memory; None for ordinary memory."""
        assert self.where is Where.SHARDED and not self.gradients.accumulated
        if memory is not self.communicator.memory:
            self.communicator.allocate_in(memory)
            self._make_segments(every=True)

    def _make_segments(self, every: bool = False) -> None:
        """Makes the segments whose dtypes have changed anew, or all of them."""
        self.values += 1
        self._changed = True
        self.segments.make_anew(every)
        self.gradients.divide_by(self.gradients.contributors)

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

    def abandon_backward(self) -> None:
        """Drops the remains of a failed backward: work in flight, gradients on leaves, partial sums."""
        self.gradients.abandon_reduction()
        if self.gradients.in_place:
            self.reshard()
        self.gradients.drop_failed()


class NoBuffers(Buffers):
    """Those of a unit without parameters: nothing is gathered, freed or reduced, and all is there."""

    communicators = ()

    def __init__(self) -> None:
        alone = Communicator(0, 1, torch.device("cpu"))
        super().__init__((), alone, alone, (), HeldBy((), "cpu"))
        self.where = Where.FULL

    def with_params(self, params: Sequence[ShardedParams]) -> Buffers:
        """Returns the same for a copy of the unit."""
        return NoBuffers()

    def set_transport(self, transport_of: Callable[[Buffers], Transport]) -> None:
        """Does nothing: nothing travels."""

    def compute_in_full(self, in_full: bool) -> None:
        """Notes the precision, in which modules without parameters compute, too."""
        self.segments.in_full = in_full

    def reshard(self, within: Communicator | None = None) -> bool:
        """Returns False: there is nothing to free."""
        return False
