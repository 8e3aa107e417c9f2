"""`Gradients`: gradients of one segment on their way from the leaves to the sharded parameters.

They wait on their leaves for the end of their unit's backward, and then move into one reduce buffer, which
the reduction empties. Without a reduction (`no_sync`) they stay in the buffer.

A reduce dtype that is wider than the leaves' is for sums: a single gradient need not be widened. So the
buffer has the leaves' dtype, unless a backward has ended without a reduction since the last one, or gradients
may be sums over tensor parallelism. Gradients of this rank alone must not decide: ranks reduce buffers of one
dtype.
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
from fsdp_wrap._core import PlugIns, SegmentDtypes, ValueSeam
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import PartialSums
from fsdp_wrap._params.sharded_params import ShardedParams

_GRAD, _LAYOUT, _STRIDED = attrgetter("grad"), attrgetter("layout"), {torch.strided}

_NOTHING = -0.0
"""The contribution of a rank without a gradient: a sum is -0.0 only if all summands are."""

_FEW_RANKS = 16
"""Up to so many, division before a sum costs at most four of fp16's small exponents."""


Pack = Callable[[list[torch.Tensor]], object]
"""Writes one gradient for each leaf, and the notes that all are used."""

BatchPlace = tuple[torch.Tensor, Pack | None]
"""A segment's part of a batch, ranks x elements; None where gradients must lie side by side before."""


class Gradients:
    """The gradients of one segment; `average_over` has to tell how many ranks contribute.

    Attributes:
        bulky: Whether one leaf's gradient alone takes half of the memory of all.
        sizeable: Whether one takes a quarter of it.
        taken: The unsharded buffer, while it is the reduce buffer (`take_in`); else None.
        collected: Whether anything is in the reduce buffer.
        kept: Whether anything was kept for a later backward; see `accumulated`.
        unreduced: Whether a backward has ended without a reduction since the last one.
        partial: A shard summed over this copy's ranks only, for the next reduction to add.
        used: For each leaf, whether the reduce buffer holds its gradient.
        factor: Number by which a sum is multiplied.
    """

    def __init__(
        self,
        params: ShardedParams,
        dtypes: SegmentDtypes,
        communicator: Communicator,
        leaves: Sequence[nn.Parameter],
        plug_ins: PlugIns,
    ) -> None:
        layout = params.layout
        self._params, self._layout, self._dtypes, self._leaves = params, layout, dtypes, leaves
        self._plug_ins = plug_ins
        parts = params.distributed
        self._over_meshes = None if parts is None else PartialSums(parts, dtypes.reduce)
        sums = self._over_meshes is not None and self._over_meshes.expected
        widens = torch.promote_types(dtypes.param, dtypes.reduce) == dtypes.reduce
        narrow = dtypes.param if widens and not sums else dtypes.reduce
        self._own = self._sums = _ReduceBuffer(communicator, layout, narrow)
        if narrow != dtypes.reduce:
            self._sums = _ReduceBuffer(communicator, layout, dtypes.reduce)
        self._views = self._own
        self.taken: Buffer | None = None
        self.collected = False
        self.used = [False] * len(leaves)
        largest = max(tensor.numel() for tensor in params.memory)
        self.bulky, self.sizeable = 2 * largest >= layout.full_numel, 4 * largest >= layout.full_numel
        self.kept = False
        self.unreduced = False
        self._waited = False  # whether gradients of earlier backwards, summed or not, are waiting
        self.partial: torch.Tensor | None = None
        if dtypes.grad != dtypes.master:
            params.gradients.take_dtype(dtypes.grad)

    @property
    def waits(self) -> bool:
        """Whether gradients wait for a reduction, perhaps of leaves that were frozen since."""
        return self.collected or self.unreduced or self.partial is not None

    @property
    def accumulated(self) -> bool:
        """Whether gradients are kept that are not summed over all ranks, and that the user has not zeroed."""
        if self.waits_for_replicas:
            return True
        return self.kept and any(
            filled and not zeroed for filled, zeroed in zip(self.used, self._params.gradients.zeroed())
        )

    @property
    def waits_for_replicas(self) -> bool:
        """Whether a sum over this copy's ranks is kept that the user has not zeroed."""
        return self.partial is not None and not self._params.gradients.zeroed_partial()

    def average_over(self, contributors: float) -> None:
        """Divides gradients by another number of ranks.

        The division comes after the sum, when only a shard is left. In fp16, where sums would overflow, it
        comes before. At many ranks that would lose small values: there the square root is divided before.
        """
        before = _divisor_before(contributors) if self._dtypes.reduce == torch.float16 else 1.0
        self._scale, self.factor = 1.0 / before, before / contributors
        self.__dict__.pop("_factor", None)

    @cached_property
    def _factor(self) -> torch.Tensor:
        """`factor`: to multiply by a number would make such a tensor each time."""
        return torch.tensor(self.factor, dtype=torch.float64, device="cpu")

    # from the leaves into the reduce buffer

    def take_in(self, buffer: Buffer, index: int) -> None:
        """Moves a leaf's gradient into the leaf's memory, in an unsharded buffer that nobody needs any more.

        It becomes the reduce buffer, unless there is one already.
        """
        there = self.taken is buffer
        if self.buffer_dtype is not self._dtypes.param or (self.collected and not there):
            return
        if not there:
            buffer.keep_alone()
            self._views = self._own.within(buffer)
            self.taken, self.collected = buffer, True
        elif self.used[index]:
            raise RuntimeError(
                f"the parameter '{self._layout.fqns[index]}' got a second gradient in one backward, "
                "when the first had taken its place: call set_gradients_in_place(model, False)"
            )
        grad = self._leaves[index].grad
        if self._over_meshes is not None:
            (grad,) = self._over_meshes.take([(index, grad)], self._views.parts, self.used, waits=True)
        self._move([(index, grad)])

    def collect(self) -> None:
        """Moves the leaves' gradients into the reduce buffer, to which more may be added."""
        if not self.collected:
            self._views = self._sums
        self._move_all(waits=True)

    def _move_all(self, waits: bool = False, pack: Pack | None = None) -> bool:
        """Moves the leaves' gradients, by `pack` to other memory if there is nothing to add or to scale.

        Returns:
            Whether they have filled that memory, or the reduce buffer, notes included.
        """
        grads = [*map(_GRAD, self._leaves)]
        if self._over_meshes is not None:
            grads = self._over_meshes.take(enumerate(grads), self._views.parts, self.used, waits)
        if self._dtypes.arriving is None:
            self._check_dtypes(grads)
        plain = {*map(type, grads)} == {torch.Tensor} and {*map(_LAYOUT, grads)} == _STRIDED
        if not plain or self._scale != 1.0 or any(self.used):
            self._move(enumerate(grads))
            return False
        for leaf in self._leaves:  # all have their first gradient
            leaf.grad = None
        self.used = [True] * len(grads)
        if pack is None:
            self._views.buffer.allocate()
            self.collected = True
        (pack or self._views.pack)(grads)
        return self._over_meshes is None  # whose sums may change notes

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
            pieces = split(index, self._params.plain_gradient(grad))
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
        """Returns the reduce buffer with all gradients, and zeros for missing ones.

        Args:
            counts_unused: Whether parameters that train get gradients of zeros if no rank used them.
        """
        if self.unreduced and not self.collected:
            self._views = self._sums
        packed = self._move_all()
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
        if not packed:
            self._layout.note_used(views.notes, filled)
        for act in self._plug_ins.sends:
            act(self._params, views.buffer.data)
        return views.buffer.data

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype of the reduce buffer at the end of the running backward."""
        return (self._sums if self.unreduced else self._own).dtype

    def move_to(self, place: BatchPlace, counts_unused: bool, allocate: Callable[[], object] | None) -> None:
        """Moves all gradients to a place in a batch, at once or through the reduce buffer.

        The batch gets its memory by `allocate`, if it has none: as late as possible.
        """
        parts, pack = place
        if pack is not None and not (self.collected or self.unreduced or self._plug_ins.sends):
            if allocate is not None:
                allocate()
            if self._move_all(pack=pack):
                return
        self.complete(counts_unused)
        if allocate is not None:
            allocate()
        parts.copy_(self._views.by_rank)
        self.kept = self.collected = False  # else a failed backward would count on the freed buffer
        self._views.buffer.free()

    # reduced gradients

    def keep_partial(self, shard: torch.Tensor) -> None:
        """Keeps a sum over this copy's ranks only for the next reduction."""
        self.partial = shard
        self._params.gradients.mark_partial()
        self.unreduced, self._waited = False, True
        self.drop()

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds reduced gradients to the sharded parameters', and empties the reduce buffer."""
        params, asks = self._params, False in self.used
        used = self._used_by_any(shard, self.used) if asks else self.used
        reduced = shard if shard.dtype is self._dtypes.grad else shard.to(self._dtypes.grad)
        if self.factor != 1.0:
            reduced.mul_(self._factor)
        for act in self._plug_ins.averaged:
            act(params, reduced)
        if asks and self._plug_ins.average_notes:
            used = self._used_by_any(reduced, used)
        for act in self._plug_ins.sees:
            act(params, ValueSeam.REDUCED, [reduced])
        self.unreduced = self._waited = False
        self.drop()
        (params.gradients.send_to_host if params.offloaded else params.gradients.add)(reduced, used)

    def _used_by_any(self, shard: torch.Tensor, used: Sequence[bool]) -> Sequence[bool]:
        """Returns for each leaf whether any rank has used it, by the notes in a reduced shard."""
        asked = [self._waited or source.requires_grad for source in self._params.sources]
        return self._layout.used_by_any(shard, used, asked)

    # gradients without a reduction

    def keep_accumulated(self) -> None:
        """Keeps the collected gradients, if any, for a later backward."""
        self.unreduced = self._waited = True
        if self.collected:
            self.kept = True
            self._params.gradients.mark_unsynced()

    def forget_zeroed(self) -> None:
        """Drops accumulated gradients that the user has zeroed on the sharded parameters since."""
        if self.partial is not None and self._params.gradients.zeroed_partial():
            self.partial = None
        for index, zeroed in enumerate(self._params.gradients.zeroed()):
            self.used[index] = self.used[index] and not zeroed

    def drop(self) -> None:
        """Drops all collected gradients and frees the reduce buffer, or gets another if it was left."""
        self.used = [False] * len(self._leaves)
        if self.collected and not self._views.buffer.free() and self.taken is None:
            one = self._sums is self._own
            self._own = self._own.anew()
            self._sums = self._own if one else self._sums.anew()
        self.kept = self.collected = False
        self._views, self.taken = self._own, None

    def leave(self) -> None:
        """Leaves the reduce buffer to a reduction that has failed, and may go on; `drop` is still to come."""
        if self.collected:
            self._views.buffer.leave()

    def drop_all(self) -> None:
        """Drops all gradients, also those summed over a part of the ranks."""
        self.drop()
        self.unreduced = self._waited = False
        self.partial = None

    def drop_failed(self) -> None:
        """Drops the gradients of a failed backward; those that earlier backwards accumulated stay."""
        for leaf in self._leaves:
            leaf.grad = None
        if not self.kept:
            self.drop()

    def _allocate(self) -> None:
        if not self.collected:
            self.collected = True
            self._views.buffer.allocate()
            for gap in self._layout.padding(self._views.buffer.data):
                gap.zero_()


class _ReduceBuffer:
    """A buffer with a view for each leaf's gradient. All are made when they are first needed."""

    def __init__(self, communicator: Communicator, layout: Layout, dtype: torch.dtype) -> None:
        self._communicator, self._layout, self.dtype = communicator, layout, dtype

    def within(self, buffer: Buffer) -> _ReduceBuffer:
        """Returns the same in a buffer that is there, with memory."""
        views = self.anew()
        views.buffer = buffer
        return views

    def anew(self) -> _ReduceBuffer:
        """Returns the same in a buffer of its own."""
        return _ReduceBuffer(self._communicator, self._layout, self.dtype)

    @cached_property
    def buffer(self) -> Buffer:
        """The buffer, which is freed at first."""
        buffer = self._communicator.buffer(self._layout.numel, self.dtype)
        buffer.free()
        return buffer

    @cached_property
    def parts(self) -> list[list[torch.Tensor]]:
        """Views for each leaf's gradient, as of `Layout.parts`."""
        with self.buffer.having_memory():
            return self._layout.parts(self.buffer.data)

    @cached_property
    def notes(self) -> torch.Tensor:
        """The view for notes of used parameters."""
        with self.buffer.having_memory():
            return self._layout.notes(self.buffer.data)

    @cached_property
    def by_rank(self) -> torch.Tensor:
        """The buffer as ranks x elements."""
        with self.buffer.having_memory():
            return self.buffer.data.view(self._layout.ranks, -1)

    @cached_property
    def pack(self) -> Pack:
        """Writes one gradient for each leaf."""
        return self._layout.packer(self.buffer.data)


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
