"""Gradients that reach sharded parameters themselves: graphs that lead to them and not to their leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_wrap._params import Segment, to_local

Tell = Callable[[str], None]
"""Warns of a gradient that is not averaged, of a parameter by its name within the unit."""


@torch.inference_mode(False)
def watch_own_gradients(segments: Sequence[Segment], tell: Tell) -> Iterator[tuple[Node, Any]]:
    """Hooks the sharded parameters of a unit; yields each node, which must be kept alive, and its hook.

    Args:
        segments: Those of the unit.
        tell: A method of the unit, to which the hooks refer weakly.
    """
    this = weakref.WeakMethod(tell)
    for segment in segments:
        sources = {source: index for index, source in enumerate(segment.params.sources)}
        for source, index in sources.items():
            if source.requires_grad and source.numel():  # torch makes no view of an empty `DTensor`
                node = get_gradient_edge(source).node
                yield node, node.register_prehook(partial(_on_own_gradient, this, segment, index))


def _on_own_gradient(
    reference: weakref.WeakMethod[Tell], segment: Segment, index: int, grads: tuple[torch.Tensor | None, ...]
) -> tuple[None] | None:
    """Handles a gradient that reaches a sharded parameter itself.

    Where every rank has the whole parameter, the gradient goes to the leaf and is averaged. The gradient of a
    shard is taken as it is, with a warning: whether ranks computed the same is unknown here.
    """
    tell, params = reference(), segment.params
    if tell is None or grads[0] is None:
        return None
    if not params.layout.sharded and params.sources[index] is not params.flat_param:
        _add_to_leaf(segment, index, grads[0])
        for hook in (segment.leaves[index]._post_accumulate_grad_hooks or {}).values():
            hook(segment.leaves[index])
        return (None,)
    tell(segment.layout.fqns[index])
    return None


@torch.no_grad()
def _add_to_leaf(segment: Segment, index: int, grad: torch.Tensor) -> None:
    """Adds a gradient of a sharded parameter to its leaf's."""
    leaf, parts = segment.leaves[index], segment.params.distributed
    part = None if parts is None else parts[index]
    held = to_local(grad).to(leaf.device, leaf.grad_dtype or leaf.dtype, copy=True)
    taken = held if part is None else part.shown_gradient(held)
    leaf.grad = taken if leaf.grad is None else leaf.grad + taken
