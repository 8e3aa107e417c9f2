"""How a unit's parameters and gradients travel, and what it holds between its verbs.

Those are parameters that some ranks keep, and a reduction in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fsdp_wrap._comm import Buffer, Communicator, Finished, Pending
from fsdp_wrap._params.segment import Segment

ReduceScatter = Callable[[list[torch.Tensor], list[torch.Tensor]], Pending]
"""Fills the shards given first from the unsharded 1-D tensors given second, which it may spoil."""


class Transport(Protocol):
    """How parameters and gradients travel between the ranks of one copy, as a `Communicator` lets them.

    Attributes:
        keeps_notes: Whether what layouts note in a reduction arrives.
        compresses_reductions: Whether gradients travel in fewer bytes, which a communication hook would end.
    """

    keeps_notes: bool
    compresses_reductions: bool

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending: ...

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending: ...


class KeptParameters:
    """The full parameters of a unit, evenly cut within some ranks that keep them from forward to backward."""

    def __init__(self, segments: list[Segment], within: Communicator) -> None:
        self._within = within
        self._parts = [within.own_part(segment.full.data).clone() for segment in segments]

    def gather(self, segments: list[Segment]) -> Pending:
        """Fills the unsharded buffers."""
        full = [segment.full for segment in segments]

        def fill() -> None:
            for target, part in zip(full, self._parts):
                self._within.own_part(target.data).copy_(part)

        return self._within.gather_into(full, fill)


class NotedReduction:
    """A reduction that loses what the ranks have noted (by a hook, encoded), with the notes beside it.

    Args:
        segments: Whose gradients are reduced.
        shards: What comes of them.
        pending: The reduction.
        ranks: Over which it sums.
    """

    def __init__(
        self, segments: list[Segment], shards: list[torch.Tensor], pending: Pending, ranks: Communicator
    ) -> None:
        self._segments, self._shards, self._pending = segments, shards, pending
        used = [mine for segment in segments for mine in segment.gradients.used]
        self._counts = torch.tensor(used, dtype=torch.float32, device=ranks.device)
        self._counting = ranks.all_reduce([self._counts])

    def wait(self) -> None:
        self._pending.wait()
        self._counting.wait()
        used = iter(self._counts.tolist())
        for segment, shard in zip(self._segments, self._shards):
            by_any = [next(used) > 0 for _ in segment.leaves]
            segment.layout.note_in_shard(shard, by_any)


class Reduction:
    """A reduction in flight: its buffers, what is still to be done, and where the result goes.

    The sum over the replicas, if any, follows that within the copy, at once if that is finished already.

    Args:
        segments: Whose gradients are reduced.
        shards: What comes of them.
        pending: The sum within the copy.
        replicas: Over which it sums then; None to keep the sum for the next reduction, of which it is part.
    """

    def __init__(
        self,
        segments: list[Segment],
        shards: list[torch.Tensor],
        pending: Pending,
        replicas: Communicator | None,
    ) -> None:
        self._segments, self._shards, self._pending = segments, shards, pending
        self._replicas = replicas
        self._in_copy = True
        self._over_replicas: Pending | None = None
        if isinstance(pending, Finished):
            self._leave_copy()

    def _leave_copy(self) -> None:
        self._in_copy = False
        for segment, shard in zip(self._segments, self._shards):
            if segment.gradients.partial is not None:
                shard.add_(segment.gradients.partial)
                segment.gradients.partial = None
        if self._replicas is not None and self._replicas.size > 1:
            self._over_replicas = self._replicas.all_reduce(self._shards)

    def finish(self) -> None:
        """Waits, and hands the sums to the segments."""
        if self._in_copy:
            self._pending.wait()
            self._leave_copy()
        if self._over_replicas is not None:
            self._over_replicas.wait()
        for segment, shard in zip(self._segments, self._shards):
            if self._replicas is None:
                segment.gradients.keep_partial(shard)
            else:
                segment.gradients.add_reduced(shard)

    def abandon(self) -> None:
        """Waits, and drops what was to be reduced."""
        self._pending.wait()
        if self._over_replicas is not None:
            self._over_replicas.wait()
        for segment in self._segments:
            segment.gradients.drop()
