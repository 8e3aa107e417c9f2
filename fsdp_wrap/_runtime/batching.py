"""`BatchingQueue`: batches of collectives, one gather or reduction for several small units.

Batches are planned from the order of the last forward or backward, the same on all ranks, and from the units'
layouts and options. If the order changes, each unit issues its own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from fsdp_wrap._core import (
    UNIT_ATTR,
    Phase,
    SpanKind,
    check_nbytes,
)
from fsdp_wrap._params import BatchedGather, BatchedGradients, HandleState, ParamHandle, Reduction, Segment
from fsdp_wrap._runtime.queue import Queue, Reducing
from fsdp_wrap._runtime.same_model import SameModel
from fsdp_wrap._runtime.unit import StepState, Unit, UnitOptions

_REDUCED_NBYTES: Callable[[ParamHandle], int] = attrgetter("reduced_nbytes")
_ON_CPU = 2 << 20
"""Default memory for batches of collectives, in bytes."""


def set_travel_together_bytes(module: nn.Module, nbytes: int | None) -> None:
    """Sets the memory for collectives that small units share, from the next outermost forward on.

    All ranks must call it with the same value.

    Args:
        module: The root: a wrapped or sharded module, whose forward is outermost.
        nbytes: Memory in bytes: one shared gather may take half of it, one shared reduction the other half.
            0 gives each unit collectives of its own; None is the default of the device.

    Raises:
        TypeError: If `nbytes` is no int.
        ValueError: If it is negative, or `module` is neither wrapped nor sharded.
    """
    check_nbytes("travel_together_bytes", nbytes)
    unit: Unit | None = vars(module).get(UNIT_ATTR) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ValueError(
            f"{type(module).__name__} is neither wrapped nor sharded; pass the root of the model"
        )
    unit.set(travel_together_bytes=nbytes)


class _Member(NamedTuple):
    """A unit of a batch, with its state when the batch was planned."""

    unit: Unit
    options: UnitOptions
    generation: int

    @classmethod
    def of(cls, unit: Unit) -> _Member:
        return cls(unit, unit.options, unit.handle.generation)


class _GatherPlan(NamedTuple):
    """A reusable plan of a batched gather.

    Attributes:
        coming: The units expected when it was planned.
        names: Names of the members.
        nbytes: Bytes of the members' unsharded buffers.
    """

    coming: list[Unit]
    members: list[_Member]
    batch: BatchedGather
    names: tuple[str, ...]
    nbytes: int


def _can_gather(members: Iterable[_Member]) -> bool:
    """Whether all members are sharded, with all to gather, and unchanged since the plan."""
    for unit, options, generation in members:
        handle = unit.handle
        if handle.state is not HandleState.SHARDED:
            return False
        if unit.options is not options or handle.generation != generation or handle.without_values:
            return False
        if handle.aside or handle.post_forward_shards is not None:  # nothing or little is left to gather
            return False
        if handle.transport is not handle.communicator or handle.keeps_storage:
            return False
    return True


class _ReductionPlan(NamedTuple):
    """A reusable plan of a batched reduction.

    Attributes:
        coming: The units whose gradients were expected when it was planned.
        segments: Indices of each unit's segments that take part; the segments themselves would be kept alive.
        first: Number of each unit's first segment in the batch.
        nbytes: Bytes of each unit's gradients.
    """

    coming: list[Unit]
    members: list[_Member]
    segments: dict[Unit, list[int]]
    first: dict[Unit, int]
    gradients: BatchedGradients
    nbytes: dict[Unit, int]

    def fits(self) -> bool:
        """Whether all members are unchanged since the plan, and no reduction of theirs is in flight."""
        for unit, options, generation in self.members:
            handle = unit.handle
            if handle.reduction is not None or unit.options is not options:
                return False
            if handle.transport is not handle.communicator or handle.has_own_reduction:
                return False
            if handle.generation != generation or handle.keeps_storage:
                return False
        return True


class BatchedReduction:
    """A batch of several units' gradients, first collected and then reduced in one collective.

    Attributes:
        missing: Units whose gradients have not come yet.
        taken: Units whose gradients were taken.
        partial: Whether the sums are kept for the next reduction, which adds them.
    """

    def __init__(self, plan: _ReductionPlan) -> None:
        self._plan = plan
        self.missing = [*plan.segments]
        self.taken: list[Unit] = []
        self.partial = False
        self._segments: list[Segment] = []
        self._reduction: Reduction | None = None

    def take(self, unit: Unit) -> bool:
        """Takes a unit's gradients; returns False if they are not as planned: the unit reduces alone."""
        handle, gradients = unit.handle, self._plan.gradients
        found, expected = handle.reduced_segments(), self._plan.segments[unit]
        self.missing.remove(unit)
        same = [*map(handle.segments.index, found)] == expected
        if not same or {segment.gradients.buffer_dtype for segment in found} != {gradients.dtype}:
            return False
        begin = None if self.taken else gradients.allocate
        for index, segment in enumerate(found, self._plan.first[unit]):
            segment.gradients.move_to(gradients.of_segments[index], unit.options.counts_unused, begin)
            begin = None
        self.taken.append(unit)
        self._segments += found
        handle.join(self)
        return True

    def send(self, phase: Phase) -> None:
        """Issues the reduction of the gradients taken so far."""
        taken, plan = self.taken, self._plan
        if not taken:
            return
        first, handle = taken[0], taken[0].handle
        units, in_copy = (*taken,), first.defers
        for act in first.plug_ins.to_reduce:
            act(units, phase, in_copy)
        numbers = [plan.first[unit] + n for unit in taken for n in range(len(plan.segments[unit]))]
        nbytes = sum(map(plan.nbytes.__getitem__, taken))
        with first.plug_ins.span(SpanKind.REDUCE, phase, units, nbytes):
            pending, shard, parts = plan.gradients.reduce(numbers)
        self.partial = in_copy
        replicas = None if in_copy else handle.replicas
        self._reduction = Reduction(self._segments, parts, pending, replicas, [shard])
        for unit in taken:
            for act in unit.plug_ins.reduces:
                act(unit, phase, plan.nbytes[unit], _names(taken))

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
            unit.handle.leave_reduction(self.partial)
        reduction, self._reduction = self._reduction, None
        return reduction


class BatchingQueue(Queue):
    """Puts small units in batches, which share a gather or a reduction.

    Args:
        step: The state of the tree's step.
        ranks: Knows which units the ranks have compared.
        before: The queue that this one replaces.
        nbytes: Memory for batches: half of it for parameters, half for gradients.
    """

    def __init__(self, step: StepState, ranks: SameModel, before: Queue, nbytes: int) -> None:
        super().__init__(step, before)
        self._ranks = ranks
        self._most = nbytes // 2  # bytes of a batch, and so of each unit in it
        self._waiting: BatchedReduction | None = None  # for gradients of more units
        self._gathers: dict[tuple[Unit, Phase], _GatherPlan] = {}  # by the issuing unit
        self._reductions: dict[tuple[Unit, bool], _ReductionPlan] = {}  # by first unit and `defers`

    # parameters

    def enter(self, unit: Unit) -> None:
        super().enter(unit)
        self._gather(unit, Phase.FORWARD)

    def come_back(self, unit: Unit) -> None:
        self._gather(unit, Phase.BACKWARD)

    def _gather(self, unit: Unit, phase: Phase) -> None:
        """Issues the gather of a sharded unit, batched with units that are expected next."""
        handle = unit.handle
        if handle.state is not HandleState.SHARDED:
            return
        if handle.batch_nbytes > self._most:
            unit.gather(phase)
            return
        forward = phase is Phase.FORWARD
        coming = self.order.coming_in_forward(unit) if forward else self.order.coming_in_backward(unit)
        plan = self._gathers.get((unit, phase))
        if plan is None or plan.coming != coming or not _can_gather(plan.members):
            plan = self._plan_gather(unit, coming, phase)
        if plan is None:
            unit.gather(phase)
            return
        units = tuple([member.unit for member in plan.members])
        for act in unit.plug_ins.to_gather:
            act(units, phase)
        segments = [each.handle.segments for each in units]
        with unit.plug_ins.span(SpanKind.GATHER, phase, units, plan.nbytes):
            shares = plan.batch.issue(segments)
        lasting = not self._step.syncs
        for each, share in zip(units, shares):
            each.handle.gather(each.lasts or lasting, share)
            for act in each.plug_ins.gathers:
                act(each, phase, each.handle.unsharded_nbytes, plan.names)
        if forward:
            self._ahead += units[1:]

    def gathered_with(self, unit: Unit) -> list[str]:
        runs = [run.names for (_, phase), run in self._gathers.items() if phase is Phase.FORWARD]
        return [name for names in runs if unit.fqn in names for name in names if name != unit.fqn]

    def _plan_gather(self, unit: Unit, coming: list[Unit], phase: Phase) -> _GatherPlan | None:
        """Plans a batched gather of a unit and coming ones; returns None if no other unit fits."""
        self._gathers.pop((unit, phase), None)
        run = [unit]
        expected = [each for each in coming if each.options.unshards_in_backward or phase is Phase.FORWARD]
        if expected and self._can_join(unit):
            run += self._companions(unit, expected, self._can_join, lambda handle: handle.batch_nbytes)
        if len(run) == 1:
            return None
        handles = [unit.handle for unit in run]
        batch = BatchedGather(handles[0].communicator, [handle.segments for handle in handles])
        nbytes = sum(handle.unsharded_nbytes for handle in handles)
        plan = _GatherPlan(coming, [*map(_Member.of, run)], batch, _names(run), nbytes)
        self._gathers[unit, phase] = plan
        return plan

    def _can_join(self, unit: Unit) -> bool:
        handle = unit.handle
        if handle.communicator.size == 1 or not _can_gather([_Member.of(unit)]):
            return False
        return self._is_small(unit, handle, handle.batch_nbytes) and self._ranks.know_gather_of(unit)

    def _is_small(self, unit: Unit, handle: ParamHandle, nbytes: int) -> bool:
        """Whether a unit may be batched, as far as the conditions are the same for gathers and reductions."""
        fits = 0 < nbytes <= self._most and not unit.options.gradients_in_place
        return fits and handle.can_be_batched

    def _companions(
        self,
        unit: Unit,
        coming: Iterable[Unit],
        may: Callable[[Unit], bool],
        size: Callable[[ParamHandle], int],
    ) -> list[Unit]:
        """Returns the coming units that fit in a batch with a unit; skips units that may not be batched."""
        kin, left = _same_ways(unit), self._most - size(unit.handle)
        found: list[Unit] = []
        for each in coming:
            if each is unit or each in found or not may(each) or _same_ways(each) != kin:
                continue
            left -= size(each.handle)
            if left < 0:
                break
            found.append(each)
        return found

    # gradients

    def before_gradients(self, unit: Unit, phase: Phase) -> None:
        if self._waiting is not None and unit in self._waiting.taken:  # more have come
            self._send(phase, unit.options.most_reducing - 1)
        super().before_gradients(unit, phase)

    def reduce(self, unit: Unit, phase: Phase) -> None:
        alone = unit.handle.batch_nbytes > self._most or phase is Phase.IDLE
        if alone or not self._take(unit):
            super().reduce(unit, phase)
        if self._waiting is not None and not self._waiting.missing:
            self._send(phase, unit.options.most_reducing - 1)

    def send(self) -> None:
        self._send(Phase.FINAL_CALLBACK, 0)

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

    def _plan_reduction(self, unit: Unit, coming: list[Unit], defers: bool) -> _ReductionPlan | None:
        self._reductions.pop((unit, defers), None)
        if not coming or not self._may_wait(unit):
            return None
        dtypes = _dtypes_of(unit)

        def may(each: Unit) -> bool:
            return each.defers == defers and self._may_wait(each) and _dtypes_of(each) == dtypes

        units = [unit, *self._companions(unit, coming, may, _REDUCED_NBYTES)]
        if len(units) == 1:
            return None
        numbers: dict[Unit, list[int]] = {}
        first: dict[Unit, int] = {}
        taking: list[Segment] = []
        for each in units:
            handle, first[each] = each.handle, len(taking)
            found = handle.reduced_segments()
            numbers[each] = [*map(handle.segments.index, found)]
            taking += found
        gradients = BatchedGradients(unit.handle.communicator, taking)
        members = [*map(_Member.of, units)]
        nbytes = {each: each.handle.reduced_nbytes for each in units}
        plan = _ReductionPlan(coming, members, numbers, first, gradients, nbytes)
        self._reductions[unit, defers] = plan
        return plan

    def _may_wait(self, unit: Unit) -> bool:
        handle = unit.handle
        if handle.reduction is not None or not handle.trainable or not unit.options.syncs:
            return False
        if not self._is_small(unit, handle, handle.reduced_nbytes) or not handle.communicator.keeps_notes:
            return False
        if handle.communicator.size == handle.replicas.size == 1:  # nothing is communicated
            return False
        one = not unit.plug_ins.takes and len(_dtypes_of(unit)) == 1
        return one and self._ranks.know_reduction_of(unit)


def queue_of(
    step: StepState, ranks: SameModel, nbytes: int | None, device: torch.device, before: Queue
) -> Queue:
    """Returns the queue for a memory of batches, which goes on where the one before stands.

    Args:
        step: The state of the tree's step.
        ranks: Knows which units the ranks have compared.
        nbytes: Memory for batches; None for the default: none on accelerators, where no figures favour them.
        device: The device of computation.
        before: The queue up to now.
    """
    if nbytes is None:
        nbytes = _ON_CPU if device.type == "cpu" else 0
    return BatchingQueue(step, ranks, before, nbytes) if nbytes > 1 else Queue(step, before)


def _same_ways(unit: Unit) -> tuple[object, ...]:
    """Returns a key of groups, communicators and memory, equal for units that may share a collective."""
    handle = unit.handle
    communicator, replicas = handle.communicator, handle.replicas
    ways = communicator, type(communicator), replicas, type(replicas)
    return *ways, communicator.memory, unit.options.reduces_apart


def _names(units: Iterable[Unit]) -> tuple[str, ...]:
    return tuple(unit.fqn for unit in units)


def _dtypes_of(unit: Unit) -> set[tuple[torch.dtype, torch.dtype]]:
    """Returns (buffer dtype, reduce dtype) of a unit's gradients."""
    segments = unit.handle.reduced_segments()
    return {(segment.gradients.buffer_dtype, segment.dtypes.reduce) for segment in segments}
