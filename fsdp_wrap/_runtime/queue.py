"""`Queue`: which gathers and reductions are in flight, how many may be, and what comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fsdp_wrap._core import BackwardPrefetch, Phase
from fsdp_wrap._params import Where
from fsdp_wrap._runtime.order import ExecOrder
from fsdp_wrap._runtime.unit import StepState, Unit


class Reducing(NamedTuple):
    """A reduction that was issued."""

    units: Sequence[Unit]
    finish: Callable[[], None]


class Queue:
    """The collectives of a tree: gathers ahead of the units that compute, reductions behind them.

    Args:
        step: The state of the tree's step.
        before: The queue that this one replaces; None for the first one.

    Attributes:
        order: The order of the units, by which it foresees what comes next.
    """

    def __init__(self, step: StepState, before: Queue | None = None) -> None:
        self._step = step
        self.order: ExecOrder = ExecOrder() if before is None else before.order
        self._ahead: list[Unit] = []  # gathered ahead in forward
        self._reducing: deque[Reducing] = deque() if before is None else before._reducing
        self._prefetching_later: Unit | None = None

    # a forward

    def enter(self, unit: Unit) -> None:
        """Gives a unit whose forward begins what was gathered ahead, unless its shards have changed."""
        if unit in self._ahead:
            self._ahead.remove(unit)
            if unit.buffers.look():
                unit.reshard(Phase.FORWARD)
        elif self._ahead and unit.options.forward_prefetch and not unit.options.forward_targets:
            for wrong in self._ahead:  # the order has changed
                wrong.reshard(Phase.FORWARD)
            self._ahead = []

    def entered(self, unit: Unit) -> None:
        """Gathers ahead, once the unit whose forward begins is full."""
        order, options = self.order, unit.options
        order.started.append(unit)
        if (options.forward_prefetch or options.forward_targets) and not unit.follows:
            expected = order.next_in_forward()
            next_one = (expected,) if options.forward_prefetch and expected is not None else ()
            for target in options.forward_targets or next_one:
                if target.buffers.where is Where.SHARDED:
                    self._ahead.append(target)
                    self._gather(target, Phase.FORWARD)
        else:
            for act in self._step.plug_ins.expects:
                act(order.next_in_forward())

    def end_forward(self) -> None:
        """Frees what was gathered ahead for units that have not run after all."""
        for unit in self._ahead:
            unit.restart()
            unit.reshard(Phase.FORWARD)
        self._ahead = []

    def _gather(self, unit: Unit, phase: Phase) -> None:
        """Issues the gather of a sharded unit that is expected next."""
        unit.gather(phase)

    def gathered_with(self, unit: Unit) -> list[str]:
        """Returns the names of the units that shared a unit's last gather in forward."""
        return []

    # a backward

    @property
    def busy(self) -> bool:
        """Whether anything waits for room: reductions in flight, or a gather ahead."""
        return bool(self._reducing or self._prefetching_later)

    def make_room_for(self, unit: Unit) -> None:
        """Makes room before the gather of a unit that a backward has reached, if one gradient takes much."""
        if unit.buffers.segments.bulky and self.busy:
            self.make_room(unit.options.most_reducing - 1)

    def come_back(self, unit: Unit) -> None:
        """Prepares for the gather of a unit that a backward has reached."""

    def prefetch_later(self, unit: Unit) -> None:
        """Puts off the gather ahead of a unit that a backward has reached, until room is made."""
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetching_later = unit

    def came_back(self, unit: Unit) -> None:
        """Gathers ahead, once the unit that a backward has reached is full."""
        prefetches = unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        if unit.buffers.segments.trainable and len(self._reducing) >= unit.options.most_reducing:
            self.prefetch_later(unit)  # reductions in flight hold memory
        if prefetches and self._prefetching_later is not unit:
            self._prefetch(unit)
        for act in self._step.plug_ins.expects:
            if self._prefetching_later or not prefetches:
                act(self._next_to_unshard(unit))

    def backward_over(self, unit: Unit) -> None:
        """Gathers ahead, once a unit's backward is over."""
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(unit)

    def _prefetch(self, unit: Unit) -> None:
        if unit.follows:  # left to the unit with which it runs, whose own gather must come before
            return
        expected = self.order.next_in_backward(unit)
        while expected is not None and expected.follows and expected in unit.companions:
            expected = self.order.next_in_backward(expected)
        targets: Iterable[Unit | None] = unit.options.backward_targets or (expected,)
        if expected is not None and expected.companions and not unit.options.backward_targets:
            targets = (*expected.tied, *expected.over_all_meshes[::-1])  # in the order of their backwards
        for target in targets:
            if target is None or not target.options.unshards_in_backward:
                continue
            if target.buffers.where is Where.SHARDED:
                self._gather(target, Phase.BACKWARD)

    def _next_to_unshard(self, unit: Unit) -> Unit | None:
        """Returns the unit whose prefetch or backward will follow that of `unit`."""
        if unit.options.backward_targets:
            return unit.options.backward_targets[0]
        expected = self.order.next_in_backward(unit, moves=False)
        return expected if expected is None or expected.options.unshards_in_backward else None

    # reductions

    def gradients_come(self, unit: Unit) -> None:
        """Makes room when a quarter of a unit's gradients have come."""
        if unit.arrivals.quarter_came and self.busy and not unit.group:
            self.make_room(unit.options.most_reducing - 1)

    def before_gradients(self, unit: Unit, phase: Phase) -> None:
        """Makes room for a unit's gradients; a reduction of the unit must end before more are taken."""
        if self.busy:
            in_flight = unit.buffers.gradients.reduction is not None
            self.make_room(0 if in_flight else unit.options.most_reducing - 1)

    def reduce(self, unit: Unit, phase: Phase) -> None:
        """Issues a unit's reduction."""
        for act in self._step.plug_ins.before_reduction:
            act(self._step)
        self.reduce_alone(unit, phase)

    def reduce_alone(self, unit: Unit, phase: Phase) -> None:
        """Issues a unit's reduction, to which this rank need not have gradients to add."""
        unit.reduce(phase)
        self._reducing.append(Reducing((unit,), unit.finish_reduction))

    def send(self) -> None:
        """Issues what is collected and was not sent."""

    def finish_reduction_of(self, unit: Unit) -> None:
        """Finishes reductions, oldest first, up to a unit's."""
        while any([unit in units for units, _ in self._reducing]):
            self.make_room(len(self._reducing) - 1)

    def make_room(self, leave: int = 0) -> None:
        """Finishes reductions, oldest first, until `leave` are in flight; issues the gather that waited."""
        while len(self._reducing) > leave:
            units, finish = self._reducing.popleft()
            for unit in units:
                for act in unit.plug_ins.awaits_reduction:
                    act(unit)
            finish()
            for unit in units:
                for act in unit.plug_ins.reduced:
                    act(unit)
        waiting, self._prefetching_later = self._prefetching_later, None
        if waiting is not None:
            self._prefetch(waiting)

    def drop(self) -> None:
        """Forgets what is in flight, of a backward that raised."""
        self._reducing.clear()
        self._prefetching_later = None
