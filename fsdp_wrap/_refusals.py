"""What must not be done with a unit's parameters, and is refused by name."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._modules import ParamSlot
from fsdp_wrap._steps import refuse_in_steps
from fsdp_wrap._unit import Unit, Use

__all__ = [
    "ParametrizationGuard",
    "refuse_earlier_optimizers",
    "refuse_graph",
    "refuse_outdated",
    "refuse_parameter_views",
]


def refuse_graph(unit: Unit, leaf: nn.Parameter) -> None:
    """Refuses a leaf's gradient that has a graph of its own.

    Raises:
        RuntimeError: If it has.
    """
    if leaf.grad is not None and leaf.grad.requires_grad:
        leaf.grad = None
        raise RuntimeError(
            f"backward(create_graph=True) reached the parameters of {unit.name}, whose reduced gradients "
            "can have no graph; use torch.autograd.grad(outputs, inputs, create_graph=True) for the "
            "inner derivative and backward() without create_graph for the outer one"
        )


def refuse_outdated(use: Use) -> None:
    """Refuses the backward of a forward that computed with other values of the parameters.

    Raises:
        RuntimeError: In any case.
    """
    how = "were converted to another dtype" if use.converted else "have changed (by a step, say)"
    raise RuntimeError(
        f"the parameters of {use.unit.name} {how} between forward and backward, which needs them as they "
        "were; run the forward again, or change them after the last backward of what it computed"
    )


def refuse_parameter_views(unit: Unit, handle: ParamHandle, tensors: Iterable[torch.Tensor]) -> None:
    """Refuses outputs of a unit's forward that lie in its full parameters' memory.

    Raises:
        RuntimeError: If one does.
    """
    for tensor in tensors:
        if tensor.layout == torch.strided and handle.owns_memory_of(tensor):
            raise RuntimeError(
                f"the forward of {unit.name} returned a parameter or a view of one, whose memory is freed "
                "when the unit reshards; return a copy (parameter.clone()) instead"
            )


class ParametrizationGuard:
    """A forward pre-hook that refuses to compute a parametrised tensor from sharded parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._unit()
        if unit is not None and unit.handle is not None and unit.handle.shows_shards:
            raise RuntimeError(
                f"a parametrised tensor of {unit.name} is computed from parameters that are sharded now; "
                "read it inside summon_full_params"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParametrizationGuard:
        unit = self._unit()
        return self if unit is None else ParametrizationGuard(memo.get(id(unit), unit))


def refuse_earlier_optimizers(unit: Unit, segments: Iterable[Iterable[ParamSlot]]) -> None:
    """Lets optimizers raise when they step that hold the Parameter objects for which others stand now."""
    handle = unit.handle
    slots = chain.from_iterable(segments)
    sources = chain.from_iterable(each.layout.sources for each in handle.segments) if handle else ()
    why = functools.partial(_why_left, weakref.ref(unit))
    refuse_in_steps(
        (slot.param, functools.partial(why, slot.fqn))
        for slot, source in zip(slots, sources)
        if slot.param is not source
    )


def _why_left(reference: weakref.ref[Unit], fqn: str) -> str:
    unit = reference()
    name = fqn if unit is None else unit.name_of(fqn)
    return (
        f"was made before the model was sharded and holds the parameter '{name}' as it was then, which "
        f"training no longer reaches (seen on rank {dist.get_rank()}): make it from model.parameters() after "
        "sharding, or wrap with FullyShardedDataParallel(..., use_orig_params=True), which keeps the "
        "Parameter objects"
    )
