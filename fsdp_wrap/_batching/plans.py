"""Plans of batches, and a batch of gradients on its way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_wrap._core import (
    Phase,
    SpanKind,
)
from fsdp_wrap._params import BatchedGather, BatchedGradients, Reduction, Segment, Where
from fsdp_wrap._runtime import Unit, UnitOptions


class Member(NamedTuple):
    """A unit of a batch, with its state when the batch was planned."""

    unit: Unit
    options: UnitOptions
    generation: int

    @classmethod
    def of(cls, unit: Unit) -> Member:
        return cls(unit, unit.options, unit.buffers.segments.generation)


class GatherPlan(NamedTuple):
    """A reusable plan of a batched gather.

    Attributes:
        coming: The units expected when it was planned.
        names: Names of the members.
        nbytes: Bytes of the members' unsharded buffers.
    """

    coming: list[Unit]
    members: list[Member]
    batch: BatchedGather
    names: tuple[str, ...]
    nbytes: int


def can_gather(members: Iterable[Member]) -> bool:
    """Whether all members are sharded, with all to gather, and unchanged since the plan."""
    for unit, options, generation in members:
        buffers, segments = unit.buffers, unit.buffers.segments
        if buffers.where is not Where.SHARDED or unit.options is not options:
            return False
        if segments.generation != generation or segments.without_values:
            return False
        if buffers.post_forward_shards is not None:  # little is left to gather
            return False
        if buffers.transport is not buffers.communicator or segments.keeps_memory:
            return False
    return True


class ReductionPlan(NamedTuple):
    """A reusable plan of a batched reduction.

    Attributes:
        coming: The units whose gradients were expected when it was planned.
        segments: Indices of each unit's segments that take part; the segments themselves would be kept alive.
        first: Number of each unit's first segment in the batch.
        nbytes: Bytes of each unit's gradients.
    """

    coming: list[Unit]
    members: list[Member]
    segments: dict[Unit, list[int]]
    first: dict[Unit, int]
    gradients: BatchedGradients
    nbytes: dict[Unit, int]

    def fits(self) -> bool:
        """Whether all members are unchanged since the plan, and no reduction of theirs is in flight."""
        if self.gradients.in_flight:  # after a failure
            return False
        for unit, options, generation in self.members:
            buffers = unit.buffers
            if buffers.gradients.reduction is not None or unit.options is not options:
                return False
            if buffers.transport is not buffers.communicator or buffers.gradients.has_own_reduction:
                return False
            if buffers.segments.generation != generation or buffers.segments.keeps_memory:
                return False
        return True


class BatchedReduction:
    """A batch of several units' gradients, first collected and then reduced in one collective.

    Attributes:
        missing: Units whose gradients have not come yet.
        taken: Units whose gradients were taken.
        partial: Whether the sums are kept for the next reduction, which adds them.
    """

    def __init__(self, plan: ReductionPlan) -> None:
        self._plan = plan
        self.missing = [*plan.segments]
        self.taken: list[Unit] = []
        self.partial = False
        self._segments: list[Segment] = []
        self._reduction: Reduction | None = None

    def take(self, unit: Unit) -> bool:
        """Takes a unit's gradients; returns False if they are not as planned: the unit reduces alone."""
        buffers, gradients = unit.buffers, self._plan.gradients
        segments, expected = buffers.gradients.reduced_segments(), self._plan.segments[unit]
        self.missing.remove(unit)
        same = [*map(buffers.segments.index, segments)] == expected
        if not same or {segment.gradients.buffer_dtype for segment in segments} != {gradients.dtype}:
            return False
        begin = None if self.taken else gradients.allocate
        for index, segment in enumerate(segments, self._plan.first[unit]):
            segment.gradients.move_to(gradients.of_segments[index], unit.options.counts_unused, begin)
            begin = None
        self.taken.append(unit)
        self._segments += segments
        buffers.gradients.join(self)
        return True

    def send(self, phase: Phase) -> None:
        """Issues the reduction of the gradients taken so far."""
        taken, plan = self.taken, self._plan
        if not taken:
            return
        first, buffers = taken[0], taken[0].buffers
        units, in_copy = (*taken,), first.defers
        for act in first.plug_ins.to_reduce:
            act(units, phase, in_copy)
        numbers = [plan.first[unit] + n for unit in taken for n in range(len(plan.segments[unit]))]
        nbytes = sum(map(plan.nbytes.__getitem__, taken))
        with first.plug_ins.span(SpanKind.REDUCE, phase, units, nbytes):
            pending, shard, parts = plan.gradients.reduce(numbers)
        self.partial = in_copy
        replicas = None if in_copy else buffers.replicas
        self._reduction = Reduction(self._segments, parts, pending, replicas, [shard])
        for unit in taken:
            for act in unit.plug_ins.reduces:
                act(unit, phase, plan.nbytes[unit], names_of(taken))

    def finish_reduction(self) -> None:
        """Waits for the reduction, and takes its result."""
        taken = self.taken
        if not taken:
            return self.finish()
        with taken[0].plug_ins.span(SpanKind.AWAIT_REDUCTION, None, tuple(taken)):
            self.finish()

    def finish(self) -> None:
        """Waits, and gives the sums to the segments of all units."""
        reduction = self._end()
        if reduction is not None:
            reduction.finish()
        self._plan.gradients.free()

    def abandon(self) -> None:
        """Waits, and drops the gradients of all units in the batch."""
        segments, reduction = self._segments, self._end()
        if reduction is not None:
            reduction.abandon()
        for segment in segments:
            segment.gradients.drop()
        self._plan.gradients.free()

    def _end(self) -> Reduction | None:
        taken, self.taken, self.missing, self._segments = self.taken, [], [], []
        for unit in taken:
            unit.buffers.gradients.leave(self.partial)
        reduction, self._reduction = self._reduction, None
        return reduction


def names_of(units: Iterable[Unit]) -> tuple[str, ...]:
    return tuple(unit.fqn for unit in units)
