"""Full parameters by hand: gathered, shown and freed outside of the path of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsdp_wrap._by_hand.backwards import end_failed_backward
from fsdp_wrap._core import NotIdleError, Phase, PlugIn, Precedence
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import Where
from fsdp_wrap._runtime import ExecOrder, Step, Unit, step_of


def _follow_user(step: Step, units: Sequence[Unit]) -> None:
    """Goes on after the user, who may have written to shards of the units."""
    for act in step.plug_ins.follows:
        act(step, units)


def unshard(unit: Unit) -> None:
    """Issues a unit's all-gather; the next iteration reuses its parameters unless they change."""
    step, buffers = step_of(unit), unit.buffers
    if graph_task() == -1 and not step.depth:
        _follow_user(step, [unit])
        if not buffers.is_current:
            unit.reshard(Phase.IDLE)
            if buffers.where is Where.SHARDED:
                buffers.follow_replaced()
    unit.gather(Phase.IDLE)
    unit.hold()


def show_unsharded(unit: Unit) -> None:
    """Shows the modules of a unit its full parameters, until it is resharded or its forward ends."""
    _follow_user(step_of(unit), [unit])
    unit.unshard(Phase.IDLE)
    unit.prepare_leaves()
    unit.buffers.shown.show_leaves()


@contextmanager
def showing(unit: Unit) -> Iterator[None]:
    """Shows a unit's full parameters while the context is open, whatever backwards end meanwhile."""
    show_unsharded(unit)
    unit.begin_call(recompute=True)  # it may be inside a backward
    try:
        yield
    finally:
        unit.end_call()
        step_of(unit).leave_backward(unit, Phase.BACKWARD)


def reshard(unit: Unit) -> None:
    """Frees a unit's full parameters, unless its forward is running; ends a backward that raised."""
    step = step_of(unit)
    if graph_task() == -1 and step.in_backward:
        raise NotIdleError(f"{unit.name} is in another thread's backward: reshard it when that has ended")
    end_failed_backward(step)
    unit.reshard(Phase.IDLE)
    if not unit.running:
        unit.buffers.reshard()  # frees shards within a smaller group as well


def follow(step: Step, order: ExecOrder | None = None) -> None:
    """Shards all units, and takes over what the user has changed, as before a forward.

    Args:
        step: The step of the units.
        order: The order by which to predict from now on, the same on all ranks.
    """
    if order is not None:
        step.queue.order.restore(order)
    _follow_user(step, step.units)
    for unit in step.units:
        reshard(unit)
        unit.buffers.become_sharded()


def wait_for(step: Step, event: Any) -> None:
    """Delays the next iteration, or gather by hand, until an event on another stream."""
    step.plug_ins.attach(_AwaitEvent(event))


class _AwaitEvent(PlugIn):
    """Lets the compute stream wait for an event, once, before shards are read."""

    order = Precedence.SETTINGS

    def __init__(self, event: Any) -> None:
        self._event = event

    def follows(self, step: Step, units: Sequence[Unit]) -> None:
        step.plug_ins.detach(self)
        self._event.wait()
