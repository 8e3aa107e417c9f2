"""`GradientBlocks`: what this rank holds of many gradients, in as few tensors as possible."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import torch
from torch import nn

from fsdp_wrap._gradient_mark import held_by_this_rank
from fsdp_wrap._layout import Layout

__all__ = ["GradientBlocks"]

_GRAD, _BASE = operator.attrgetter("grad"), operator.attrgetter("grad._base")
_DATA_PTR, _NUMEL = torch.Tensor.data_ptr, torch.Tensor.numel


class GradientBlocks:
    """The gradients of several layouts' sharded parameters.

    The layouts say which tensors hold them. How each gradient lies in those is noted, and as long as the next
    gradients lie alike, nobody is asked again: looking at all of them at once takes a fraction of the time.

    Args:
        layouts: Whose gradients they are.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._held = [
            [param for param in dict.fromkeys(layout.sources) if held_by_this_rank(param).numel()]
            for layout in layouts
        ]
        self._noted: _Lie | None = None

    def find(self) -> list[torch.Tensor]:
        """Returns them as `Layout.gradient_blocks` does: none empty, zero padding perhaps among them."""
        known = None if self._noted is None else self._noted.blocks()
        return self._ask() if known is None else known

    def _ask(self) -> list[torch.Tensor]:
        asked = [layout.gradient_blocks() for layout in self._layouts]
        self._noted = _Lie.of(self._held, asked)
        return [*chain.from_iterable(asked)]


class _Lie:
    """How gradients lie in blocks: those of each layout in one, or the layout has none.

    Args:
        held: The sharded parameters of each layout of which this rank holds something.
        blocks: The block of each layout, if there is one.
    """

    @classmethod
    def of(cls, held: Sequence[list[nn.Parameter]], blocks: Sequence[list[torch.Tensor]]) -> _Lie | None:
        """Returns how they lie now; None where they do not lie so, or not in the parameters' own manner."""
        for params, found in zip(held, blocks):
            kinds = {type(param.grad) for param in params}
            wrapped = any(held_by_this_rank(param) is not param for param in params)
            if wrapped or len(found) > 1 or kinds - {torch.Tensor if found else type(None)}:
                return None
        return cls(held, [found[0] if found else None for found in blocks])

    def __init__(self, held: Sequence[list[nn.Parameter]], blocks: Sequence[torch.Tensor | None]) -> None:
        filled = [(params, block) for params, block in zip(held, blocks) if block is not None]
        self._without = [*chain.from_iterable(params for params, block in zip(held, blocks) if block is None)]
        self._params = [*chain.from_iterable(params for params, _ in filled)]
        self._counts = [len(params) for params, _ in filled]
        self._firsts = [(params[0], _GRAD if params[0].grad is block else _BASE) for params, block in filled]
        self._numels = [block.numel() for _, block in filled]
        begins = self._begins([block for _, block in filled])
        self._offsets = array("q", map(operator.sub, self._addresses(), begins))

    def blocks(self) -> list[torch.Tensor] | None:
        """Returns the blocks of the gradients that there are now; None where these do not lie alike."""
        try:
            addresses = [*self._addresses()]
        except TypeError:  # there is one gradient less
            return None
        blocks = [grad(param) for param, grad in self._firsts]
        more = {*map(type, map(_GRAD, self._without))} - {type(None)}
        if more or {*map(type, blocks)} - {torch.Tensor} or [*map(_NUMEL, blocks)] != self._numels:
            return None
        return blocks if [*map(operator.add, self._begins(blocks), self._offsets)] == addresses else None

    def _addresses(self) -> Iterator[int]:
        """Where each gradient lies; one after the other, so that each is looked at once."""
        return map(_DATA_PTR, map(_GRAD, self._params))

    def _begins(self, blocks: Sequence[torch.Tensor]) -> chain[int]:
        """For each gradient, the address of its block."""
        return chain.from_iterable(map(repeat, map(_DATA_PTR, blocks), self._counts))
