"""`BatchingQueue`: batches of collectives, one gather or reduction for several small units.

Batches are planned from the order of the last forward or backward, the same on all ranks, and from the units'
layouts and options. If the order changes, each unit issues its own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from fsdp_wrap._batching.plans import (
    BatchedReduction,
    GatherPlan,
    Member,
    ReductionPlan,
    can_gather,
    names_of,
)
from fsdp_wrap._core import (
    Phase,
    SpanKind,
)
from fsdp_wrap._params import BatchedGather, BatchedGradients, Buffers, Segment, Where
from fsdp_wrap._runtime import Queue, Reducing, Step, Unit

_REDUCED_NBYTES: Callable[[Buffers], int] = attrgetter("gradients.reduced_nbytes")


class BatchingQueue(Queue):
    """Puts small units in batches, which share a gather or a reduction.

    Args:
        step: Runs the tree's steps.
        before: The queue that this one replaces.
        nbytes: Memory for batches: half of it for parameters, half for gradients.
    """

    def __init__(self, step: Step, before: Queue, nbytes: int) -> None:
        super().__init__(step, before)
        self._ranks = step.ranks
        self._most = nbytes // 2  # bytes of a batch, and so of each unit in it
        self._waiting: BatchedReduction | None = None  # for gradients of more units
        self._gathers: dict[tuple[Unit, Phase], GatherPlan] = {}  # by the issuing unit
        self._reductions: dict[tuple[Unit, bool], ReductionPlan] = {}  # by first unit and `defers`

    # parameters

    def enter(self, unit: Unit) -> None:
        if self._ahead:
            super().enter(unit)
        if unit.buffers.where is Where.SHARDED and unit.buffers.segments.batch_nbytes <= self._most:
            self._gather(unit, Phase.FORWARD)

    def come_back(self, unit: Unit) -> None:
        if unit.buffers.where is Where.SHARDED and unit.buffers.segments.batch_nbytes <= self._most:
            self._gather(unit, Phase.BACKWARD)

    def _gather(self, unit: Unit, phase: Phase) -> None:
        """Issues the gather of a sharded unit, batched with units that are expected next."""
        if unit.buffers.segments.batch_nbytes > self._most:
            unit.gather(phase)
            return
        forward = phase is Phase.FORWARD
        coming = self.order.coming_in_forward(unit) if forward else self.order.coming_in_backward(unit)
        plan = self._gathers.get((unit, phase))
        if plan is None or plan.coming != coming or not can_gather(plan.members):
            plan = self._plan_gather(unit, coming, phase)
        if plan is None:
            unit.gather(phase)
            return
        units = tuple([member.unit for member in plan.members])
        for act in unit.plug_ins.to_gather:
            act(units, phase)
        segments = [member.buffers.segments for member in units]
        with unit.plug_ins.span(SpanKind.GATHER, phase, units, plan.nbytes):
            shares = plan.batch.issue(segments)
        for member, share in zip(units, shares):
            member.buffers.gather(share)
            for act in member.plug_ins.gathers:
                act(member, phase, member.buffers.segments.unsharded_nbytes, plan.names)
        if forward:
            self._ahead += units[1:]

    def gathered_with(self, unit: Unit) -> list[str]:
        runs = [run.names for (_, phase), run in self._gathers.items() if phase is Phase.FORWARD]
        return [name for names in runs if unit.fqn in names for name in names if name != unit.fqn]

    def _plan_gather(self, unit: Unit, coming: list[Unit], phase: Phase) -> GatherPlan | None:
        """Plans a batched gather of a unit and coming ones; returns None if no other unit fits."""
        self._gathers.pop((unit, phase), None)
        run = [unit]
        expected = [
            next_one for next_one in coming if next_one.options.unshards_in_backward or phase is Phase.FORWARD
        ]
        if expected and self._can_join(unit):
            run += self._companions(
                unit, expected, self._can_join, lambda buffers: buffers.segments.batch_nbytes
            )
        if len(run) == 1:
            return None
        all_buffers = [unit.buffers for unit in run]
        batch = BatchedGather(all_buffers[0].communicator, [buffers.segments for buffers in all_buffers])
        nbytes = sum(buffers.segments.unsharded_nbytes for buffers in all_buffers)
        plan = GatherPlan(coming, [*map(Member.of, run)], batch, names_of(run), nbytes)
        self._gathers[unit, phase] = plan
        return plan

    def _can_join(self, unit: Unit) -> bool:
        buffers = unit.buffers
        if buffers.communicator.size == 1 or not can_gather([Member.of(unit)]):
            return False
        return self._is_small(unit, buffers.segments.batch_nbytes) and self._ranks.know_gather_of(unit)

    def _is_small(self, unit: Unit, nbytes: int) -> bool:
        """Whether a unit may be batched, as far as the conditions are the same for gathers and reductions."""
        fits = 0 < nbytes <= self._most and not unit.plug_ins.brings
        return fits and _can_be_batched(unit.buffers)

    def _companions(
        self,
        unit: Unit,
        coming: Iterable[Unit],
        may: Callable[[Unit], bool],
        size: Callable[[Buffers], int],
    ) -> list[Unit]:
        """Returns the coming units that fit in a batch with a unit; skips units that may not be batched."""
        kin, left = _same_ways(unit), self._most - size(unit.buffers)
        companions: list[Unit] = []
        for other in coming:
            if other is unit or other in companions or not may(other) or _same_ways(other) != kin:
                continue
            left -= size(other.buffers)
            if left < 0:
                break
            companions.append(other)
        return companions

    # gradients

    def before_gradients(self, unit: Unit, phase: Phase) -> None:
        if self._waiting is not None and unit in self._waiting.taken:  # more have come
            self._send(phase, unit.options.most_reducing - 1)
        if self._reducing or self._prefetching_later:
            super().before_gradients(unit, phase)

    def reduce(self, unit: Unit, phase: Phase) -> None:
        alone = unit.buffers.segments.batch_nbytes > self._most or phase is Phase.IDLE
        if alone or not self._take(unit):
            super().reduce(unit, phase)
        if self._waiting is not None and not self._waiting.missing:
            self._send(phase, unit.options.most_reducing - 1)

    def send(self) -> None:
        try:
            self._send(Phase.FINAL_CALLBACK, 0)
        except (RuntimeError, MemoryError) as error:
            self._step.explain(error)
            raise

    def drop(self) -> None:
        super().drop()
        self._waiting = None  # the units drop its gradients

    def _send(self, phase: Phase, in_flight: int) -> None:
        """Issues the waiting batch, if any, complete or not; `in_flight` others may stay in flight."""
        waiting = self._waiting
        if waiting is None:
            return
        if self._reducing:
            self.make_room(in_flight)
        for act in self._step.plug_ins.before_reduction:
            act(self._step)
        self._waiting = None
        waiting.send(phase)
        self._reducing.append(Reducing(waiting.taken, waiting.finish_reduction))

    def _take(self, unit: Unit) -> bool:
        """Adds a unit's gradients to a batch; returns False if they need their own reduction."""
        self.order.reduced.append(unit)
        waiting = self._waiting
        if waiting is None:
            coming, defers = self.order.coming_to_reduce(), unit.defers
            plan = self._reductions.get((unit, defers))
            if plan is None or plan.coming != coming or not plan.fits():
                plan = self._plan_reduction(unit, coming, defers)
            if plan is None:
                return False
            waiting = self._waiting = BatchedReduction(plan)
        if unit not in waiting.missing:
            return False
        if waiting.take(unit):
            return True
        self._reductions.clear()  # units are not as planned
        return False

    def _plan_reduction(self, unit: Unit, coming: list[Unit], defers: bool) -> ReductionPlan | None:
        self._reductions.pop((unit, defers), None)
        if not coming or not self._may_wait(unit):
            return None
        dtypes = _dtypes_of(unit)

        def may(other: Unit) -> bool:
            return other.defers == defers and self._may_wait(other) and _dtypes_of(other) == dtypes

        units = [unit, *self._companions(unit, coming, may, _REDUCED_NBYTES)]
        if len(units) == 1:
            return None
        numbers: dict[Unit, list[int]] = {}
        first: dict[Unit, int] = {}
        taking: list[Segment] = []
        for member in units:
            buffers, first[member] = member.buffers, len(taking)
            segments = buffers.gradients.reduced_segments()
            numbers[member] = [*map(buffers.segments.index, segments)]
            taking += segments
        gradients = BatchedGradients(unit.buffers.communicator, taking)
        members = [*map(Member.of, units)]
        nbytes = {member: member.buffers.gradients.reduced_nbytes for member in units}
        plan = ReductionPlan(coming, members, numbers, first, gradients, nbytes)
        self._reductions[unit, defers] = plan
        return plan

    def _may_wait(self, unit: Unit) -> bool:
        buffers, gradients = unit.buffers, unit.buffers.gradients
        if gradients.reduction is not None or not buffers.segments.trainable or not unit.options.syncs:
            return False
        if not self._is_small(unit, gradients.reduced_nbytes) or not buffers.communicator.keeps_notes:
            return False
        if buffers.communicator.size == buffers.replicas.size == 1:  # nothing is communicated
            return False
        one = not unit.plug_ins.takes and len(_dtypes_of(unit)) == 1
        return one and self._ranks.know_reduction_of(unit)


def _can_be_batched(buffers: Buffers) -> bool:
    """Whether the communicator alone gathers and reduces, from and to memory that comes and goes."""
    if buffers.transport is not buffers.communicator or buffers.gradients.has_own_reduction:
        return False
    if buffers.segments.keeps_memory or buffers.segments.extended:
        return False
    return not any(sharded.offloaded for sharded in buffers.params)


def _same_ways(unit: Unit) -> tuple[object, ...]:
    """Returns a key of groups, communicators and memory, equal for units that may share a collective."""
    buffers = unit.buffers
    communicator, replicas = buffers.communicator, buffers.replicas
    ways = communicator, type(communicator), replicas, type(replicas)
    return *ways, communicator.memory, unit.options.reduces_apart


def _dtypes_of(unit: Unit) -> set[tuple[torch.dtype, torch.dtype]]:
    """Returns (buffer dtype, reduce dtype) of a unit's gradients."""
    segments = unit.buffers.gradients.reduced_segments()
    return {(segment.gradients.buffer_dtype, segment.dtypes.reduce) for segment in segments}
