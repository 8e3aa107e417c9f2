"""Ends of backwards by hand, and which sums of gradients they make."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from fsdp_wrap._core import NotIdleError, Phase, refuse_in_steps
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
    step.ending.finish()
    for unit in step.units:
        for segment in unit.segments:
            segment.gradients.drop_all()


def end_failed_backward(step: Step) -> None:
    """Shows the sharded parameters again after a backward that raised."""
    if step.backward_open and not step.in_backward:
        step.abandon_backward()


# sums


@contextmanager
def no_sync(step: Step, reduce_within_copy: bool = False) -> Iterator[None]:
    """Accumulates gradients while the context is open: unreduced, or reduced within each copy."""
    if reduce_within_copy:
        require_between_backwards(step, "no_sync(reduce_within_copy=True)")
        refuse_steps_between_sums(step.units)
    with summing(step, reduce_within_copy, not reduce_within_copy):
        yield


@contextmanager
def summing(step: Step, syncs: bool, sums_over_replicas: bool) -> Iterator[None]:
    """Makes the given sums of gradients while the context is open."""
    before = step.syncs, step.sums_over_replicas
    step.syncs, step.sums_over_replicas = syncs, sums_over_replicas
    try:
        yield
    finally:
        step.syncs, step.sums_over_replicas = before


def require_between_backwards(step: Step, doing: str) -> None:
    """Raises a `NotIdleError` inside a backward, where some units have reduced already."""
    if step.backward_open and graph_task() != -1:
        raise NotIdleError(
            f"{doing} was called inside a backward of {step.root.name} on rank {dist.get_rank()}: some "
            "of its gradients would be summed over the replicas, others not; call it between backwards"
        )


def refuse_steps_between_sums(units: Iterable[Unit]) -> None:
    """Makes optimizers raise on `step` while gradients wait for a sum over the replicas."""
    for unit in units:
        for sharded in unit.params:
            trained = next((source for source in sharded.sources if source.requires_grad), None)
            if trained is not None:  # one parameter is enough: all of a segment are summed together
                refuse_in_steps(trained, partial(_why_not_between, weakref.ref(unit)))


def _why_not_between(reference: weakref.ref[Unit]) -> str | None:
    unit = reference()
    if unit is None or not any(segment.gradients.waits_for_replicas for segment in unit.segments):
        return None
    return (
        f"must not step now: gradients of {unit.name} are summed over a part of the ranks only (seen on rank "
        f"{dist.get_rank()}). Run the last backward before the step after set_requires_all_reduce(True), or "
        "outside of no_sync(reduce_within_copy=True); zero_grad() forgets them"
    )
