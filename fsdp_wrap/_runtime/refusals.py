"""Errors of a step that name the unit or the parameters at fault."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import refuse_in_steps
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import ShardedParams
from fsdp_wrap._runtime.unit import Unit

_OUTSIDE = (
    "If this is {} used outside of its module's forward: it was sharded then (on rank {}). Use its "
    "full_tensor() (fully_shard), keep it from resharding, or make one unit of the modules that use it"
)


def refuse_graph(unit: Unit, leaf: nn.Parameter) -> None:
    """Refuses a leaf's gradient that has a graph of its own."""
    if leaf.grad is not None and leaf.grad.requires_grad:
        leaf.grad = None
        raise RuntimeError(
            f"backward(create_graph=True) reached the parameters of {unit.name}, whose reduced gradients "
            "can have no graph; use torch.autograd.grad(outputs, inputs, create_graph=True) for the "
            "inner derivative and backward() without create_graph for the outer one"
        )


def name_sharded(error: BaseException, units: Iterable[Unit]) -> None:
    """Adds to an operator's error the sharded parameters that may have caused it.

    An error about mixed `DTensor`s names no tensor. An error about sizes has the size of the shard.
    """
    message = str(error)
    mixed, sizes = "mixed torch.Tensor and DTensor" in message, {*map(int, re.findall(r"\d+", message))}
    vague = "1-D tensor" in message
    of_sizes = vague or re.search("size mismatch|The size of tensor|shapes cannot be", message)
    if type(error) is not RuntimeError or _OUTSIDE[-30:] in message or not (mixed or of_sizes):
        return
    names = [
        unit.name_of(fqn)
        for unit in units
        for sharded in (unit.params if unit.handle.shows_shards else ())
        for fqn, numel in _shown_pieces(sharded)
        if mixed or (numel is not None and (vague or numel in sizes))
    ]
    if names:
        several = f" or another of {len(names)} parameters" if len(names) > 1 else ""
        error.args = (
            f"{message}\n{_OUTSIDE.format(repr(names[0]) + several, dist.get_rank())}",
            *error.args[1:],
        )


def _shown_pieces(sharded: ShardedParams) -> Iterable[tuple[str, int | None]]:
    """Returns the parameter names, with the numbers of elements shown; None for `DTensor`s."""
    if any(isinstance(source, DTensor) for source in sharded.sources):
        return ((fqn, None) for fqn in sharded.layout.fqns)
    return ((interval.fqn, interval.data.numel()) for interval in sharded.intervals())


def refuse_alone(unit: Unit) -> None:
    """Refuses a forward of a tied unit outside of the unit that unshards it."""
    if graph_task() == -1 and not unit.running:
        assert unit.tied_to is not None
        raise RuntimeError(
            f"{unit.name} may be skipped (allow_skipping), so it runs only inside the forward of "
            f"{unit.tied_to.name}, and rank {dist.get_rank()} ran it alone"
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
