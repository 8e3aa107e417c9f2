"""`Schedule`: the step of a tree, with what users and other ranks ask of it by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import NotIdleError, Phase, Seam, load_watchers
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import Where
from fsdp_wrap._runtime.order import ExecOrder
from fsdp_wrap._runtime.queue import Queue
from fsdp_wrap._runtime.refusals import refuse_steps_between_sums
from fsdp_wrap._runtime.step import Step
from fsdp_wrap._runtime.unit import Unit

_alive: weakref.WeakSet[Schedule] = weakref.WeakSet()

joins: Seam[Callable[[nn.Module], Any]] = Seam("uneven ranks", "fsdp_wrap._uneven")
"""Returns what `torch.distributed.algorithms.Join` needs of a wrapper: `hook` and `group`."""


class Schedule(Step):
    """The step of a tree of units, and what is done with the tree by hand.

    Args:
        root: The unit whose forward is outermost; all units below it join.
    """

    def __init__(self, root: Unit) -> None:
        super().__init__(root)
        _alive.add(self)

    @property
    def runs_backward(self) -> bool:
        """Whether a backward runs, and no forward inside it."""
        return self._backward_open and not self.depth

    @property
    def _in_backward(self) -> bool:
        """Whether a backward runs, in this thread or in another than the forward's."""
        return graph_task() != -1 or (self._end() is not None and get_ident() != self._thread)

    def end_failed_backward(self) -> None:
        """Shows the sharded parameters again after a backward that raised."""
        if self._backward_open and not self._in_backward:
            self._abandon_backward()

    # for other ranks

    def copy_order(self) -> ExecOrder:
        """Returns the order of units up to now, by which prefetches and batches are predicted."""
        return self.queue.order.copy()

    def follow(self, order: ExecOrder | None = None) -> None:
        """Shards all units, and takes over what the user has changed, as before a forward.

        Args:
            order: The order by which to predict from now on, the same on all ranks.
        """
        if order is not None:
            self.queue.order.restore(order)
        self._follow_user(self._units)
        for unit in self.units:
            self.reshard(unit)
            unit.buffers.become_sharded()

    def go_on_with(self, queue: Queue) -> None:
        """Replaces the queue by one that was made of it, between a forward and the next."""
        self.queue = queue

    # by hand

    def unshard(self, unit: Unit) -> None:
        """Issues a unit's all-gather; the next iteration reuses its parameters unless they change."""
        buffers = unit.buffers
        if graph_task() == -1 and not self.depth:
            self._follow_user([unit])
            if not buffers.is_current:
                unit.reshard(Phase.IDLE)
                if buffers.where is Where.SHARDED:
                    buffers.follow_replaced()
        unit.gather(Phase.IDLE)
        unit.hold()

    def show_unsharded(self, unit: Unit) -> None:
        """Shows the modules of a unit its full parameters, until it is resharded or its forward ends."""
        self._follow_user([unit])
        unit.unshard(Phase.IDLE)
        unit.prepare_leaves()
        unit.buffers.shown.show_leaves()

    @contextmanager
    def showing(self, unit: Unit) -> Iterator[None]:
        """Shows a unit's full parameters while the context is open, whatever backwards end meanwhile."""
        self.show_unsharded(unit)
        unit.running += 1
        try:
            yield
        finally:
            unit.running -= 1
            self._leave_backward(unit, Phase.BACKWARD)

    def reshard(self, unit: Unit) -> None:
        """Frees a unit's full parameters, unless its forward is running; ends a backward that raised."""
        if graph_task() == -1 and self._in_backward:
            raise NotIdleError(f"{unit.name} is in another thread's backward: reshard it when that has ended")
        self.end_failed_backward()
        unit.reshard(Phase.IDLE)
        if not unit.running:
            unit.buffers.reshard()  # frees shards within a smaller group as well

    @torch.no_grad()
    def finalize(self) -> None:
        """Ends by hand all backwards since the last end, except for `await_reduction`."""
        if not self.iteration:
            return
        if any(unit.buffers.replicas.size > 1 for unit in self._units):
            self.queue.make_room()  # starts sums over replicas
        self.ending.check(self.root, self._units, self._backward_open or graph_task() != -1)
        for unit in self._units:
            self.end_backwards_of(unit)

    @torch.no_grad()
    def end_backwards_of(self, unit: Unit) -> None:
        """Ends by hand the backwards of one unit, except for `await_reduction`."""
        unit.buffers.gradients.forget_zeroed()
        self._leave_backward(unit, Phase.IDLE)
        self._take_gradients(unit, Phase.IDLE)

    def await_reduction(self) -> None:
        """Waits for the last reduction."""
        self._close(True)

    def wait_for(self, event: Any) -> None:
        """Delays the next iteration, or gather by hand, until an event on another stream."""
        self._event = event

    def reset(self) -> None:
        """Drops all state that a forward or backward left, and gradients that wait for a reduction."""
        self._abandon_backward()
        self.ending.finish()
        for unit in self._units:
            for segment in unit.segments:
                segment.gradients.drop_all()

    # sums

    @contextmanager
    def no_sync(self, reduce_within_copy: bool = False) -> Iterator[None]:
        """Accumulates gradients while the context is open: unreduced, or reduced within each copy."""
        if reduce_within_copy:
            self.require_between_backwards("no_sync(reduce_within_copy=True)")
            refuse_steps_between_sums(self._units)
        with self.summing(reduce_within_copy, not reduce_within_copy):
            yield

    @contextmanager
    def summing(self, syncs: bool, sums_over_replicas: bool) -> Iterator[None]:
        """Makes the given sums of gradients while the context is open."""
        before = self.syncs, self.sums_over_replicas
        self.syncs, self.sums_over_replicas = syncs, sums_over_replicas
        try:
            yield
        finally:
            self.syncs, self.sums_over_replicas = before

    def require_between_backwards(self, doing: str) -> None:
        """Raises a `NotIdleError` inside a backward, where some units have reduced already."""
        if self._backward_open and graph_task() != -1:
            raise NotIdleError(
                f"{doing} was called inside a backward of {self.root.name} on rank {dist.get_rank()}: some "
                "of its gradients would be summed over the replicas, others not; call it between backwards"
            )

    def require_idle(self, doing: str) -> None:
        """Raises a `NotIdleError` inside a forward or backward; ends a backward, or a load, that raised."""
        running = next((unit for unit in self._units if unit.running), None)
        where = "a backward" if self._in_backward else ""
        if running is not None:
            where = f"the forward of {running.name}"
        elif not where and self.plug_ins.separate:
            where = "uneven() or Join: not all ranks may come here"
        if where:
            raise NotIdleError(f"{doing} must not run inside {where}")
        self.end_failed_backward()
        for act in dict.fromkeys(chain.from_iterable(unit.plug_ins.rests for unit in self._units)):
            act(self)


def schedule_of(unit: Unit) -> Schedule:
    """Returns a unit's schedule; makes one, with the unit as root, if it has none yet."""
    schedule = unit.schedule or Schedule(unit)
    assert isinstance(schedule, Schedule)
    return schedule


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Raises a `NotIdleError` inside a forward or backward of any of the units.

    Ends backwards and loads that raised, so that updates are done and full parameters are no longer shown.
    """
    for schedule in dict.fromkeys(map(schedule_of, units)):
        schedule.require_idle(doing)


def note_change(units: Iterable[Unit], what: str, call: object) -> None:
    """Notes a change of values that all ranks must make; see `SameModel.note_change`."""
    for unit in units:
        schedule_of(unit).ranks.note_change(unit, what, call)


def _note_optimizer_load(optimizer: torch.optim.Optimizer) -> None:
    """Notes that an optimizer of some trees has loaded its state, as those of all ranks must."""
    loaded = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for schedule in [*_alive]:
        for unit in schedule.units:
            if any(id(param) in loaded for sharded in unit.params for param in sharded.sharded_params):
                note_change([unit], "optimizer load", call=loaded)


load_watchers.append(_note_optimizer_load)
