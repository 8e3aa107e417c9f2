"""`Gradients`: those of one segment's leaves, on their way from the leaves to the sharded parameters.

They wait on their leaves for the end of their unit's backward, are moved into one reduce buffer at once, and
leave it with the reduction. Gradients that no reduction takes (`no_sync`) stay in the buffer.

A reduce dtype that is wider than that of the leaves is the sums': what is added only once need not be wide
before. So the buffer is as narrow as the leaves, unless a backward has ended without a reduction since the
last one. What this rank accumulated must not decide: ranks reduce buffers of one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import Buffer, Communicator
from fsdp_wrap._core import SegmentDtypes
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import PartialSums

_GRAD, _LAYOUT, _STRIDED = attrgetter("grad"), attrgetter("layout"), {torch.strided}

_NOTHING = -0.0
"""Stands where this rank has no gradient: a sum is -0.0 only if all that is summed is."""

_FEW_RANKS = 16
"""Up to so many, dividing before a sum costs at most four of fp16's small exponents."""


class Gradients:
    """The gradients of one segment.

    Args:
        layout: How they lie in the reduce buffer.
        dtypes: Of the segment.
        communicator: Allocates the reduce buffer.
        contributors: By how much summed gradients are divided: over so many ranks they are averaged.
        leaves: Whose gradients they are.

    Attributes:
        bulky: Whether one leaf's gradient alone takes half of the memory of all.
        sizeable: Whether one takes a quarter of it.
        kept: Whether anything was kept for a later backward; see `accumulated`.
        collected: Whether there is anything in the reduce buffer.
        buffer: What serves as the reduce buffer now.
        unreduced: Whether a backward has ended without a reduction since the last one.
        partial: A shard that was summed over this copy's ranks only, to be added to the next reduction's.
        used: For each leaf, whether the reduce buffer holds a gradient of it.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: SegmentDtypes,
        communicator: Communicator,
        contributors: float,
        leaves: Sequence[nn.Parameter],
    ) -> None:
        self._layout, self._dtypes, self._leaves = layout, dtypes, leaves
        widens = torch.promote_types(dtypes.param, dtypes.reduce) == dtypes.reduce
        narrow = dtypes.param if widens else dtypes.reduce
        self._own = self._sums = self._freed_buffer(communicator, narrow)
        if narrow != dtypes.reduce:
            self._sums = self._freed_buffer(communicator, dtypes.reduce)
        self._lie_in(self._own)
        self.collected = False
        self.used = [False] * len(leaves)
        largest = max(each.numel() for each in layout.memory)
        self.bulky, self.sizeable = 2 * largest >= layout.full_numel, 4 * largest >= layout.full_numel
        self.kept = False
        self.unreduced = self._waited = False  # the latter: parts of earlier backwards, summed or not
        self.partial: torch.Tensor | None = None
        self._over_meshes = None if layout.distributed is None else PartialSums(layout.distributed)
        self.average_over(contributors)
        if dtypes.grad != dtypes.master:
            layout.take_gradients_in(dtypes.grad)

    @property
    def accumulated(self) -> bool:
        """Whether gradients are kept whose sum over all ranks is not there and the user has not zeroed."""
        if self.waits_for_replicas:
            return True
        return self.kept and any(
            filled and not zeroed for filled, zeroed in zip(self.used, self._layout.zeroed())
        )

    @property
    def waits_for_replicas(self) -> bool:
        """Whether a sum over this copy's ranks is kept that the user has not zeroed."""
        return self.partial is not None and not self._layout.zeroed_partial()

    def average_over(self, contributors: float) -> None:
        """Divides gradients by another number of ranks.

        After they are summed, when only a shard is left to divide. In fp16 sums would overflow: there before,
        at many ranks, where that would lose small ones, by about the square root only.
        """
        before = _divisor_before(contributors) if self._dtypes.reduce == torch.float16 else 1.0
        self._scale, after = 1.0 / before, before / contributors
        # Multiplying by a number would make such a tensor each time.
        self._factor = None if after == 1.0 else torch.tensor(after, dtype=torch.float64, device="cpu")

    # from the leaves into the reduce buffer

    def take_in(self, buffer: Buffer, index: int) -> None:
        """Moves a leaf's gradient into an unsharded buffer that nobody needs any more where the leaf lies.

        It becomes the reduce buffer, unless there is one already.

        Raises:
            RuntimeError: If a gradient lies there already.
        """
        narrow = self._sums is self._own or not self.unreduced
        there = self.buffer is buffer
        if not narrow or (self.collected and not there):
            return
        if not there:
            buffer.keep_alone()
            self._lie_in(_ReduceBuffer(buffer, self._layout))
            self.collected = True
        elif self.used[index]:
            raise RuntimeError(
                f"the parameter '{self._layout.fqns[index]}' got a second gradient in one backward, "
                "when the first had taken its place: call "
                "set_gradients_in_place(model, False)"
            )
        grad = self._leaves[index].grad
        if self._over_meshes is not None:
            (grad,) = self._over_meshes.take([(index, grad)], self._views.parts, self.used, waits=True)
        self._move([(index, grad)])

    def collect(self) -> None:
        """Moves what gradients the leaves hold into the reduce buffer, where more may be added."""
        if not self.collected:
            self._lie_in(self._sums)
        self._move_all(waits=True)

    def _move_all(self, waits: bool = False) -> None:
        grads = [*map(_GRAD, self._leaves)]
        if self._over_meshes is not None:
            grads = self._over_meshes.take(enumerate(grads), self._views.parts, self.used, waits)
        if self._dtypes.arriving is None:
            self._check_dtypes(grads)
        plain = {*map(type, grads)} == {torch.Tensor} and {*map(_LAYOUT, grads)} == _STRIDED
        if not plain or self._scale != 1.0 or any(self.used):
            self._move(enumerate(grads))
            return
        for leaf in self._leaves:  # all have their first gradient
            leaf.grad = None
        self.used = [True] * len(grads)
        self.buffer.allocate()
        self._views.pack(grads)
        self.collected = True

    def _check_dtypes(self, grads: Sequence[torch.Tensor | None]) -> None:
        expected = self._dtypes.param
        for fqn, grad in zip(self._layout.fqns, grads):
            if grad is not None and grad.dtype != expected:
                raise RuntimeError(
                    f"the parameter '{fqn}', whose grad_dtype is None, got a gradient of {grad.dtype} on "
                    f"rank {dist.get_rank()}, not of {expected} in which it was computed: ranks cannot know "
                    "in which to reduce: set MixedPrecisionPolicy(reduce_dtype=...)"
                )

    def _move(self, arrived: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        leaves, filled, parts, split = self._leaves, self.used, self._views.parts, self._layout.split
        targets: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for index, grad in arrived:
            if grad is None:
                continue
            leaves[index].grad = None
            pieces = split(index, grad if grad.layout is torch.strided else grad.to_dense())
            if filled[index]:
                for target, piece in zip(parts[index], pieces):
                    target.add_(piece, alpha=self._scale)
            else:
                filled[index] = True
                targets += parts[index]
                grads += pieces
        if targets:
            self._allocate()
            _copy_scaled(targets, grads, self._scale)

    def complete(self, counts_unused: bool = False) -> torch.Tensor:
        """Returns the reduce buffer, with all gradients, and zeros where none came.

        Args:
            counts_unused: Whether parameters that train and that no rank used are to get gradients of zeros.
        """
        if self.unreduced and not self.collected:
            self._lie_in(self._sums)
        self._move_all()
        if self._over_meshes is not None:
            self._over_meshes.settle(self._views.parts, self.used)
        views, filled = self._views, self.used
        if False in filled:
            self._allocate()
            for index, parts in enumerate(views.parts):
                if not filled[index]:
                    filled[index] = counts_unused and self._leaves[index].requires_grad
                    for part in parts:
                        part.fill_(0.0 if filled[index] else _NOTHING)
        self._layout.note_used(views.notes, filled)
        return views.tensor

    @property
    def travels_in(self) -> torch.dtype:
        """The dtype of the reduce buffer at the end of the running backward."""
        return (self._sums if self.unreduced else self._own).tensor.dtype

    def free_copied(self) -> None:
        """Frees the memory of a complete reduce buffer that travels by a copy, until `drop`."""
        self.kept = False  # a backward that fails must not leave what is not there
        self.buffer.free()

    # what was reduced

    def keep_partial(self, shard: torch.Tensor) -> None:
        """Keeps what was summed over this copy's ranks only for the next reduction."""
        self.partial = shard
        self._layout.mark_partial()
        self.unreduced, self._waited = False, True
        self.drop()

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds the reduced gradients to the sharded parameters', and forgets what was reduced."""
        used: Sequence[bool] = self.used
        if False in used:  # else there is nothing to ask
            used = self._layout.used_by_any(shard, used, frozen=self._waited)
        reduced = shard if shard.dtype is self._dtypes.grad else shard.to(self._dtypes.grad)
        if self._factor is not None:
            reduced.mul_(self._factor)
        if self._layout.average_hook is not None:
            self._layout.average_hook(reduced[: reduced.numel() - self._layout.noted_numel])
        self.unreduced = self._waited = False
        self.drop()
        if self._layout.offloaded:
            self._layout.send_to_host(reduced, used)
        else:
            self._layout.add_reduced(reduced, used)

    # what was not

    def keep_accumulated(self) -> None:
        """Keeps the gradients collected so far, if any, for a later backward."""
        self.unreduced = self._waited = True
        if self.collected:
            self.kept = True
            self._layout.mark_unsynced()

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since on the sharded parameters."""
        if self.partial is not None and self._layout.zeroed_partial():
            self.partial = None
        for index, zeroed in enumerate(self._layout.zeroed()):
            self.used[index] = self.used[index] and not zeroed

    def drop(self) -> None:
        """Forgets all that was collected and frees the reduce buffer."""
        self.used = [False] * len(self._leaves)
        self.kept = False
        self.collected = False
        self.buffer.free()
        if self._views is not self._own:
            self._lie_in(self._own)

    def drop_all(self) -> None:
        """Forgets all gradients, also those summed over a part of the ranks."""
        self.drop()
        self.unreduced = self._waited = False
        self.partial = None

    def drop_failed(self) -> None:
        """Forgets what a failed backward left; what earlier backwards accumulated stays."""
        for leaf in self._leaves:
            leaf.grad = None
        if not self.kept:
            self.drop()

    def _freed_buffer(self, communicator: Communicator, dtype: torch.dtype) -> _ReduceBuffer:
        buffer = communicator.buffer(self._layout.numel, dtype)
        views = _ReduceBuffer(buffer, self._layout)
        buffer.free()  # its memory comes when it is needed
        return views

    def _lie_in(self, views: _ReduceBuffer) -> None:
        self._views, self.buffer = views, views.buffer

    def _allocate(self) -> None:
        if not self.collected:
            self.collected = True
            self.buffer.allocate()
            for gap in self._layout.padding(self._views.tensor):
                gap.zero_()


class _ReduceBuffer:
    """A buffer with views of it, in which the gradients of all leaves lie side by side."""

    def __init__(self, buffer: Buffer, layout: Layout) -> None:
        self.buffer = buffer
        self.tensor = buffer.tensor.data  # an alias: leaves' version counters do not move
        self.parts = layout.parts(self.tensor)
        self.notes = layout.notes(self.tensor)
        self._layout = layout

    @cached_property
    def pack(self) -> Callable[[list[torch.Tensor]], object]:
        """Writes one gradient for each leaf."""
        return self._layout.packer(self.tensor)


def _copy_scaled(targets: list[torch.Tensor], grads: list[torch.Tensor], scale: float) -> None:
    if scale == 1.0:
        foreach_copy_(targets, grads)
        return
    for target, grad in zip(targets, grads):
        if torch.promote_types(grad.dtype, target.dtype) == grad.dtype:
            torch.mul(grad, scale, out=target)  # copied, divided and cast in one pass: rounded once
        else:
            target.copy_(grad).mul_(scale)  # divided in the wider dtype


def _divisor_before(contributors: float) -> float:
    if contributors <= _FEW_RANKS:
        return contributors
    return float(2 ** math.ceil(math.log2(contributors) / 2))
