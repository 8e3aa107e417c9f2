"""Ends of backwards by hand."""

from __future__ import annotations

import torch

from fsdp_wrap._core import Phase
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime import Step, Unit


@torch.no_grad()
def finalize(step: Step) -> None:
    """Ends by hand all backwards since the last end, except for `await_reduction`."""
    if not step.iteration:
        return
    if any(unit.buffers.replicas.size > 1 for unit in step.units):
        step.queue.make_room()  # starts sums over replicas
    _refuse_early_end(step)
    for unit in step.units:
        end_backwards_of(step, unit)


def _refuse_early_end(step: Step) -> None:
    """Refuses a `finalize_backward` that is too early or would leave sums over replicas incomplete."""
    step.ending.require_waited("finalize_backward()")
    if not step.ending.manual:
        raise RuntimeError(
            f"the backwards of {step.root.name} end by themselves; to end them by finalize_backward(), call "
            "set_manual_backward_finalization(True) before the forward"
        )
    if step.backward_open or graph_task() != -1:
        raise RuntimeError(
            "finalize_backward() was called inside a backward, or after one that raised; call it after "
            "backward(), or reset_iter_state()"
        )
    for unit in step.units:
        buffers = unit.buffers
        partial_sums = buffers.gradients.partly_summed or (buffers.gradients.untaken and unit.options.syncs)
        if unit.defers and partial_sums:
            raise RuntimeError(
                f"gradients of {unit.name} are summed over a part of the ranks only; call "
                "set_requires_all_reduce(True) before the last backward that finalize_backward() ends"
            )


@torch.no_grad()
def end_backwards_of(step: Step, unit: Unit) -> None:
    """Ends by hand the backwards of one unit, except for `await_reduction`."""
    unit.buffers.gradients.forget_zeroed()
    step.leave_backward(unit, Phase.IDLE)
    step.take_gradients(unit, Phase.IDLE)


def await_reduction(step: Step) -> None:
    """Waits for the last reduction."""
    step.close(True)


def reset(step: Step) -> None:
    """Drops all state that a forward or backward left, and gradients that wait for a reduction."""
    step.abandon_backward()
    step.drop_backward()  # what ended backwards have left
    step.ending.finish()
    for unit in step.units:
        for segment in unit.segments:
            segment.gradients.drop_all()


def end_failed_backward(step: Step) -> None:
    """Shows the sharded parameters again after a backward that raised."""
    if not step.in_backward:
        step.abandon_backward()
