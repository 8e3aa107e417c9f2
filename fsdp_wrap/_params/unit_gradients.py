"""`UnitGradients`: one unit's gradients, from the leaves through a reduction to the sharded parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from fsdp_wrap._comm import Accelerator, Communicator, accelerator_of, await_arrivals
from fsdp_wrap._core import PlugIns, format_dtype
from fsdp_wrap._params.collectives import (
    InReduction,
    NotedReduction,
    ReduceScatter,
    Reduction,
    Transport,
    leave_buffers,
)
from fsdp_wrap._params.segment import Segment


class UnitGradients:
    """Collects, reduces and keeps the gradients of one unit.

    Args:
        segments: The unit's segments; the list gets others when the dtypes of parameters change.
        communicator: The ranks that hold one copy of the unit between them.
        replicas: The ranks that hold the same part of other copies.
        plug_ins: What is attached to the unit, to its steps and to all steps.

    Attributes:
        transport: Sums gradients over the ranks of one copy.
        contributors: Number by which sums are divided: of the ranks, unless chosen otherwise.
        reduction: The reduction in flight, or None.
        unsummed: Whether a backward has left gradients that are not summed over all ranks yet.
        has_own_reduction: Whether `reduce_by` has replaced the reduction.
    """

    def __init__(
        self, segments: list[Segment], communicator: Communicator, replicas: Communicator, plug_ins: PlugIns
    ) -> None:
        self._segments, self._communicator, self._plug_ins = segments, communicator, plug_ins
        self.transport: Transport = communicator
        self._replicas = self._averaging = replicas  # the latter of sums within a copy
        self._reduce_scatter: ReduceScatter | None = None
        self.has_own_reduction = self.unsummed = False
        self.reduction: InReduction | None = None
        self.divide_by(communicator.size * replicas.size)

    # settings

    def reduce_by(self, reduce_scatter: ReduceScatter, replicas: Communicator) -> None:
        """Replaces the reduction by one that averages; the shards are averaged over `replicas` afterwards."""
        self._reduce_scatter, self._averaging = reduce_scatter, replicas
        self.has_own_reduction = True
        self.divide_by(replicas.size)

    def divide_by(self, contributors: float) -> None:
        """Divides sums of gradients by another number than the number of ranks."""
        self.contributors = contributors
        for segment in self._segments:
            segment.gradients.average_over(contributors)

    def reduce_like(self, other: UnitGradients) -> None:
        """Takes over the settings of another unit, of which this one is a copy."""
        if not other._plug_ins.takes:  # else its divisor is that of sums which a copy does not have
            self.divide_by(other.contributors)
        if other._reduce_scatter is not None:
            self.reduce_by(other._reduce_scatter, other._averaging)

    # from the leaves into the reduce buffers

    @property
    def untaken(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        for segment in self._segments:
            if segment.gradients.collected and self.reduction is None:
                return True
            for leaf in segment.leaves:
                if leaf.grad is not None:
                    return True
        return False

    @property
    def in_place(self) -> bool:
        """Whether gradients lie where the full parameters were."""
        return any(segment.gradients.taken is segment.full for segment in self._segments)

    def take_in_place(self, leaf: nn.Parameter) -> None:
        """Moves a leaf's gradient into the leaf's memory, if that may serve as the reduce buffer."""
        for segment in self._segments:
            if leaf in segment.places:
                segment.take_in_place(segment.places[leaf])

    def collect(self) -> None:
        """Moves the leaves' gradients into the reduce buffers, to which more may be added."""
        for segment in self._segments:
            segment.gradients.collect()

    # reductions

    def reduced_segments(self) -> list[Segment]:
        """Returns the segments that take part in a reduction, the same on all ranks."""
        return [segment for segment in self._segments if segment.trainable or segment.gradients.waits]

    def nbytes_by_dtype(self) -> dict[str, int]:
        """Returns the bytes of the gradients in a reduction, by the dtype in which they travel."""
        nbytes = Counter[torch.dtype]()
        for segment in self.reduced_segments():
            dtype = segment.gradients.buffer_dtype
            nbytes[dtype] += segment.layout.numel * dtype.itemsize
        return {format_dtype(dtype): count for dtype, count in nbytes.items()}

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the gradients in a reduction."""
        return sum(self.nbytes_by_dtype().values())

    def reduce(self, over_replicas: bool = True, counts_unused: bool = False) -> int:
        """Issues the reduce-scatter of every segment that holds gradients; returns the bytes concerned.

        Args:
            over_replicas: Whether the sum over the replicas follows, and not only after the next reduction.
            counts_unused: Whether parameters that no rank used get gradients of zeros.
        """
        segments = self.reduced_segments()
        full = [segment.gradients.complete(counts_unused) for segment in segments]
        for act in self._plug_ins.takes:
            act(self, segments, full)
        if self.reduction is None:
            empty = self._communicator.empty
            shards = [empty(segment.layout.shard_numel, segment.dtypes.reduce) for segment in segments]
            try:
                pending = (self._reduce_scatter or self.transport.reduce_scatter)(shards, full)
            except BaseException:  # some may be on their way
                leave_buffers(segments)
                raise
            if self.has_own_reduction or not self.transport.keeps_notes:
                ranks = self._communicator if self._communicator.size > 1 else self._replicas
                pending = NotedReduction(segments, shards, pending, ranks)
            at_once = over_replicas or self._averaging.size == 1
            self.reduction = Reduction(segments, shards, pending, self._averaging if at_once else None)
        return sum(buffer.nbytes for buffer in full)

    def join(self, reduction: InReduction) -> None:
        """Leaves the gradients to a batched reduction, or to that of a plug-in."""
        self.reduction = reduction

    def leave(self, partial: bool = False) -> None:
        """Notes the end of a batched reduction; `partial` if the next one adds its sums."""
        self.reduction = None
        self.unsummed = partial

    def finish(self) -> None:
        """Waits for the reduction in flight, and adds its result to the sharded parameters' gradients."""
        assert self.reduction is not None
        reduction, self.reduction = self.reduction, None
        self.unsummed = reduction.partial
        reduction.finish()

    @property
    def arriving(self) -> bool:
        """Whether reduced gradients are on their way to the host."""
        return any(segment.params.gradients.arriving for segment in self._segments)

    def take_arriving(self) -> Callable[[], None] | None:
        """Hands over the reduced gradients that are on their way to the host, if there are any.

        Returns:
            Waits for them, and adds them to those of the sharded parameters; any thread may call it.
        """
        accelerator = accelerator_of(self._communicator.device)
        if accelerator is None or not self.arriving:
            return None
        adding = [segment.params.gradients.take_arriving() for segment in self._segments]
        return partial(_add_arrived, accelerator, adding)

    # without a reduction (`no_sync`)

    @property
    def accumulated(self) -> bool:
        """Whether gradients wait for a later backward, which sums them over all ranks."""
        return any(segment.gradients.accumulated for segment in self._segments)

    @property
    def partly_summed(self) -> bool:
        """Whether sums over this copy's ranks only wait for the next reduction."""
        return any(segment.gradients.partial is not None for segment in self._segments)

    def keep_accumulated(self) -> None:
        """Keeps the collected gradients for a later backward."""
        for segment in self._segments:
            if segment.trainable:
                segment.gradients.keep_accumulated()
            self.unsummed = self.unsummed or segment.gradients.kept

    def forget_zeroed(self) -> None:
        """Drops accumulated gradients that the user has zeroed since."""
        for segment in self._segments if self.unsummed else ():
            if segment.gradients.kept or segment.gradients.partial is not None:
                segment.gradients.forget_zeroed()

    # after a failure

    def abandon_reduction(self) -> None:
        """Waits for the reduction in flight, if any, and drops its gradients."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.abandon()

    def drop_failed(self) -> None:
        """Drops the gradients of a failed backward; those that earlier backwards accumulated stay."""
        for segment in self._segments:
            segment.gradients.drop_failed()


def _add_arrived(accelerator: Accelerator, adding: Sequence[Callable[[], None]]) -> None:
    await_arrivals(accelerator)
    for add in adding:
        add()
