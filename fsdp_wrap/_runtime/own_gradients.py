"""Gradients that reach sharded parameters themselves: graphs that lead to them and not to their leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_wrap._params import Segment

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
                yield node, node.register_prehook(_OwnGradient(this, segment, index))


class _OwnGradient:
    """Handles a gradient that reaches a sharded parameter itself.

    Where every rank has the whole parameter, the gradient goes to the leaf and is averaged. The gradient of a
    shard is taken as it is, with a warning: whether ranks computed the same is unknown here.
    """

    __slots__ = ("_index", "_segment", "_tell")

    def __init__(self, tell: weakref.WeakMethod[Tell], segment: Segment, index: int) -> None:
        self._tell, self._segment, self._index = tell, segment, index

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        tell, segment, index = self._tell(), self._segment, self._index
        params = segment.params
        if tell is None or grads[0] is None:
            return None
        if not params.layout.sharded and params.sources[index] is not params.flat_param:
            segment.take_gradient(index, grads[0])
            for hook in (segment.leaves[index]._post_accumulate_grad_hooks or {}).values():
                hook(segment.leaves[index])
            return (None,)
        tell(segment.layout.fqns[index])
        return None
