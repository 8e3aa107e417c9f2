"""`Segment`: the memory of one layout: unsharded buffer, leaves and reduce buffer."""

from __future__ import annotations

import math

import torch

from fsdp_wrap._buffers import same_elements
from fsdp_wrap._collectives import Communicator, ResidentBuffer
from fsdp_wrap._layout import Layout
from fsdp_wrap._precision import SegmentDtypes

__all__ = ["Segment"]

_FEW_RANKS = 16
"""Up to so many, dividing before a sum costs at most four of fp16's small exponents."""


class Segment:
    """One layout with its unsharded buffer, its leaves and its reduce buffer.

    Args:
        layout: How the parameters lie in the buffers.
        dtypes: Of the buffers.
        communicator: Allocates the buffers.
        contributors: By how much summed gradients are divided: over so many ranks they are averaged.
    """

    def __init__(
        self, layout: Layout, dtypes: SegmentDtypes, communicator: Communicator, contributors: float
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self._communicator = communicator
        self.average_over(contributors)
        self._partial: torch.Tensor | None = None
        resident = layout.resident if dtypes.param == dtypes.master else None
        self.full = (
            communicator.buffer(layout.full_numel, dtypes.param)
            if resident is None
            else ResidentBuffer(resident)
        )
        self.gathered = self.full if layout.in_place else communicator.buffer(layout.numel, dtypes.param)
        self.leaves = layout.make_leaves(self.full.tensor)
        self._alias_full()
        self.full.free()  # before the other one is allocated
        self.gathered.free()
        self.grads = communicator.buffer(layout.numel, dtypes.reduce)
        self._grad_parts = layout.parts(self.grads.tensor)
        self._grad_padding = layout.padding(self.grads.tensor)
        self._filled = [False] * len(self.leaves)
        self._accumulated = False
        self.grads.free()
        if dtypes.grad != dtypes.master:
            layout.allow_gradients_of_any_dtype()

    @property
    def trainable(self) -> bool:
        """Whether any leaf needs a gradient now."""
        return any(leaf.requires_grad for leaf in self.leaves)

    def describe(self) -> str:
        """Says how many elements this rank holds of how many, and of which dtypes."""
        held = sum(interval.data.numel() for interval in self.layout.intervals())
        frozen = "" if any(source.requires_grad for source in self.layout.sources) else " (frozen)"
        return f"{held} of {sum(leaf.numel() for leaf in self.leaves)} {self.dtypes}{frozen}"

    def arrange(self) -> None:
        """Fills the unsharded buffer with what was gathered, if it is not the same."""
        if self.gathered is not self.full:
            self.full.allocate()
            for source, target in self._copies:
                target.copy_(source)
            self.gathered.free()

    def free(self) -> None:
        """Frees the unsharded buffer; memory that a NumPy array shares is left to the array."""
        if self.full.resizable:
            self.full.free()
            self.gathered.free()
            return
        self.full = self._communicator.buffer(self.layout.full_numel, self.dtypes.param)
        if self.layout.in_place:
            self.gathered = self.full
        self.gathered.allocate()
        self._alias_full()
        self.full.free()
        self.gathered.free()

    def follow_resident(self) -> None:
        """Goes over to where a layout's resident buffer lies now."""
        if self.layout.resident is not None and self.dtypes.param == self.dtypes.master:
            self.full = self.gathered = ResidentBuffer(self.layout.resident)
            self._alias_full()

    def _alias_full(self) -> None:
        # Written through an alias of its own, so that autograd's version counters do not move.
        self.full_data = self.full.tensor.data
        self.gathered_data = self.full_data if self.gathered is self.full else self.gathered.tensor.data
        self.own_data = self._communicator.own_part(self.gathered_data)
        self._copies = same_elements(self.layout, self.gathered_data, self.full_data)
        for leaf, view in zip(self.leaves, self.layout.views(self.full.tensor)):
            leaf.data = view

    def follow_requires_grad(self) -> bool:
        """Lets leaves need gradients as the sharded parameters do; returns whether any changed."""
        changed = False
        for leaf, source in zip(self.leaves, self.layout.sources):
            if leaf.requires_grad != source.requires_grad:
                leaf.requires_grad_(source.requires_grad)
                changed = True
        return changed

    def average_over(self, contributors: float) -> None:
        """Divides gradients taken from now on by another number of ranks.

        Before they are summed, so that no sum overflows. At many ranks this would lose small ones in fp16:
        there about the square root goes before, and the rest after.
        """
        before = _divisor_before(contributors) if self.dtypes.reduce == torch.float16 else contributors
        self._scale, self._scale_after = 1.0 / before, before / contributors

    def take_gradient(self, index: int) -> None:
        """Moves a leaf's gradient into the reduce buffer, divided by the number of ranks."""
        leaf = self.leaves[index]
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        self._allocate_gradients()
        filled, self._filled[index] = self._filled[index], True
        dense = grad.to_dense() if grad.layout != torch.strided else grad
        for part, piece in zip(self._grad_parts[index], self.layout.split(index, dense)):
            _accumulate(part, piece, self._scale, filled)

    def complete_gradients(self, counts_unused: bool = False) -> torch.Tensor:
        """Returns the reduce buffer, with zeros where no gradient came.

        Args:
            counts_unused: Whether parameters that no rank used are to get gradients of zeros.
        """
        self._allocate_gradients()
        for parts, filled in zip(self._grad_parts, self._filled):
            for part in () if filled else parts:
                part.zero_()
        self._filled = [filled or counts_unused for filled in self._filled]
        self.layout.note_used(self.grads.tensor, self._filled)
        return self.grads.tensor

    def keep_partial(self, shard: torch.Tensor) -> None:
        """Keeps what was summed over this copy's ranks only, until `take_partial`."""
        self._partial = shard
        self.drop_gradients()

    def take_partial(self, shard: torch.Tensor) -> None:
        """Adds what was kept by `keep_partial`, if anything."""
        if self._partial is not None:
            shard.add_(self._partial)
            self.drop_partial()

    def drop_partial(self) -> None:
        """Forgets what was kept by `keep_partial`."""
        self._partial = None

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds the reduced gradients to the sharded parameters', and forgets what was reduced."""
        reduced = shard.to(self.dtypes.grad)
        if self._scale_after != 1.0:
            reduced.mul_(self._scale_after)
        self.layout.add_reduced(reduced, self._filled)
        self.drop_gradients()

    def keep_accumulated(self) -> None:
        """Keeps the gradients taken so far for a later backward."""
        if self.grads.allocated:
            self._accumulated = True
            self.layout.mark_unsynced()

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since on the sharded parameters."""
        if self._accumulated:
            for index, zeroed in enumerate(self.layout.zeroed()):
                self._filled[index] = self._filled[index] and not zeroed

    @property
    def accumulates(self) -> bool:
        """Whether gradients are kept that no reduction has seen and the user has not zeroed."""
        return self._accumulated and any(
            filled and not zeroed for filled, zeroed in zip(self._filled, self.layout.zeroed())
        )

    def drop_gradients(self) -> None:
        """Forgets all gradients and frees the reduce buffer."""
        self._filled = [False] * len(self.leaves)
        self._accumulated = False
        self.grads.free()

    def drop_partial_gradients(self) -> None:
        """Forgets what a failed backward left; what earlier backwards accumulated stays."""
        for leaf in self.leaves:
            leaf.grad = None
        if not self._accumulated:
            self.drop_gradients()

    def _allocate_gradients(self) -> None:
        if not self.grads.allocated:
            self.grads.allocate()
            for gap in self._grad_padding:
                gap.zero_()


def _divisor_before(contributors: float) -> float:
    if contributors <= _FEW_RANKS:
        return contributors
    return float(2 ** math.ceil(math.log2(contributors) / 2))


def _accumulate(view: torch.Tensor, grad: torch.Tensor, scale: float, filled: bool) -> None:
    if filled:
        view.add_(grad, alpha=scale)
    elif scale == 1.0:
        view.copy_(grad)
    elif torch.promote_types(grad.dtype, view.dtype) == grad.dtype:
        torch.mul(grad, scale, out=view)  # copy, division and cast in one pass: rounded once, no overflow
    else:
        view.copy_(grad).mul_(scale)  # divided in the wider dtype
