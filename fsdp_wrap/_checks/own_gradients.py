"""Gradients that reach sharded parameters themselves: graphs that lead to them and not to their leaves."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_wrap._core import PlugIn, Precedence, warn_caller
from fsdp_wrap._params import Segment, to_local
from fsdp_wrap._runtime import Unit

_Watched = list[tuple[Node, Any]]
"""Nodes, each with the buffers of its hook. They lead to sharded parameters, but to no module."""


class OwnGradients(PlugIn):
    """Averages gradients of sharded parameters themselves where all ranks have them whole, else warns."""

    order = Precedence.CHECKS

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[nn.Module, dict[str, _Watched]] = weakref.WeakKeyDictionary()
        self._told_of: weakref.WeakSet[Unit] = weakref.WeakSet()

    @torch.inference_mode(False)
    def trains(self, unit: Unit) -> None:
        """Hooks the sharded parameters of a unit that train now; their nodes must be kept alive."""
        if unit.gone:  # its tree still asks
            return
        of_module = self._watched.setdefault(unit.module, {})
        for _, hook in of_module.pop(unit.mesh_label, []):
            hook.remove()
        watched = of_module[unit.mesh_label] = []
        for number, params in enumerate(unit.params):
            sources = {source: index for index, source in enumerate(params.sources)}
            for source, index in sources.items():
                if source.requires_grad and source.numel():  # torch makes no view of an empty `DTensor`
                    node = get_gradient_edge(source).node
                    arrives = partial(self._arrives, weakref.ref(unit), number, index)
                    watched.append((node, node.register_prehook(arrives)))

    def _arrives(
        self, of: weakref.ref[Unit], number: int, index: int, grads: tuple[torch.Tensor | None, ...]
    ) -> tuple[None] | None:
        """Handles a gradient that reaches a sharded parameter itself, of a segment by its number.

        Where every rank has the whole parameter, the gradient goes to the leaf and is averaged. The gradient
        of a shard is taken as it is, with a warning: whether ranks computed the same is unknown here.
        """
        unit = of()
        if unit is None or unit.gone or grads[0] is None:
            return None
        segment = unit.segments[number]
        params = segment.params
        if not params.layout.sharded and params.sources[index] is not params.flat_param:
            _add_to_leaf(segment, index, grads[0])
            for hook in (segment.leaves[index]._post_accumulate_grad_hooks or {}).values():
                hook(segment.leaves[index])
            return (None,)
        if unit not in self._told_of:
            self._told_of.add(unit)
            _warn(unit, segment.layout.fqns[index])
        return None


@torch.no_grad()
def _add_to_leaf(segment: Segment, index: int, grad: torch.Tensor) -> None:
    """Adds a gradient of a sharded parameter to its leaf's."""
    leaf, parts = segment.leaves[index], segment.params.distributed
    part = None if parts is None else parts[index]
    held = to_local(grad).to(leaf.device, leaf.grad_dtype or leaf.dtype, copy=True)
    taken = held if part is None else part.shown_gradient(held)
    leaf.grad = taken if leaf.grad is None else leaf.grad + taken


def _warn(unit: Unit, param: str) -> None:
    """Warns that the gradient of a sharded parameter itself is not averaged."""
    warn_caller(
        f"a gradient reached the sharded parameter '{unit.name_of(param)}' itself on rank "
        f"{dist.get_rank()}, since a graph uses it outside of the forward of {unit.name}. It is taken "
        "as it is, not averaged: right for what all ranks compute alike, or each with its own elements "
        "(a penalty), wrong for what depends on their batches. For that use full_tensor() of the "
        "parameter itself (fully_shard), the module's forward, or one unit for all that uses it"
    )
