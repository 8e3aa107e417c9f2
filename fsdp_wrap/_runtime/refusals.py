"""Errors of a step that name the unit or the parameters at fault."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime.unit import Unit


def refuse_graph(unit: Unit, leaf: nn.Parameter) -> None:
    """Refuses a leaf's gradient that has a graph of its own."""
    if leaf.grad is not None and leaf.grad.requires_grad:
        leaf.grad = None
        raise RuntimeError(
            f"backward(create_graph=True) reached the parameters of {unit.name}, whose reduced gradients "
            "can have no graph; use torch.autograd.grad(outputs, inputs, create_graph=True) for the "
            "inner derivative and backward() without create_graph for the outer one"
        )


def refuse_alone(unit: Unit) -> None:
    """Refuses a forward of a tied unit outside of the unit that unshards it."""
    if graph_task() == -1 and not unit.running:
        assert unit.tied_to is not None
        raise RuntimeError(
            f"{unit.name} may be skipped (allow_skipping), so it runs only inside the forward of "
            f"{unit.tied_to.name}, and rank {dist.get_rank()} ran it alone"
        )
