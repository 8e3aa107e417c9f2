"""Which sums of gradients backwards make, and gradients that wait for a later one (`no_sync`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from fsdp_wrap._core import NotIdleError, PlugIn, Precedence, everywhere, refuse_in_steps
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime import Step, Unit


class Accumulation(PlugIn):
    """Keeps gradients that a backward does not sum, or sums over some ranks only, for a later backward."""

    order = Precedence.SETTINGS

    def backward_opens(self, step: Any) -> None:
        """Forgets gradients that wait, and that the user has zeroed since."""
        for unit in step.units:
            unit.buffers.gradients.forget_zeroed()

    def backward_closes(self, step: Any, complete: bool) -> None:
        for unit in step.units:
            if not (step.syncs and unit.options.syncs):
                unit.buffers.gradients.keep_accumulated()


@cache
def accumulate() -> None:
    """Attaches `Accumulation` to all steps of this process: when sums are left out for the first time."""
    everywhere.attach(Accumulation())


def set_sums(units: Iterable[Unit], **sums: bool) -> None:
    """Sets which sums of gradients the backwards of units make: `syncs`, `sums_over_replicas`."""
    if not all(sums.values()):
        accumulate()
    for unit in units:
        unit.set(**sums)


def sum_in_backward(step: Step, syncs: bool, sums_over_replicas: bool) -> None:
    """Decides, whatever `no_sync` says, which sums the backward makes that begins now."""
    if not (syncs and sums_over_replicas):
        accumulate()
    step.sum_in_backward(syncs, sums_over_replicas)


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
    if not (syncs and sums_over_replicas):
        accumulate()
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
