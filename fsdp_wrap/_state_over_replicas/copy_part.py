"""`CopyPart`: one segment's part of this rank's copy, which stays gathered over the replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_wrap._core import ChangedBetweenError, steps_taken
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import Segment, ShardedParams, Written, same_sample, trains


class _ShardState:
    """The state of a segment's shard when it was gathered over the replicas."""

    def __init__(self, sharded: ShardedParams, written: Written) -> None:
        self._sharded, self._written = sharded, written
        self._trains = trains(sharded)
        # Elsewhere a look would make the host wait for the device; in a plan there are no numbers.
        on_host = sharded.flat_param.untyped_storage().device.type == "cpu"
        self._sampled = sharded.sample() if on_host else None
        self._sample = None if self._sampled is None else self._sampled.clone()

    def is_outdated(self, written: Written, stepped: bool) -> bool:
        """Whether the shard may have other values now, as far as all ranks can tell alike.

        Args:
            written: The present `written()`.
            stepped: Whether any optimizer has stepped since. Not all that do move version counters.
        """
        return written != self._written or trains(self._sharded) != self._trains or (stepped and self._trains)

    @property
    def was_written_unseen(self) -> bool:
        """Whether the shard was written to through an alias without a version counter, as `.data` is."""
        now, before = self._sampled, self._sample
        return now is not None and before is not None and not same_sample(now, before)


class CopyPart:
    """The shards of one place in all copies, in the dtype in which they are gathered.

    Attributes:
        data: Copies x elements of a shard.
        regions: The segment's gathered buffer, by copy.
    """

    regions: list[torch.Tensor]

    def __init__(self, segment: Segment, copies: int, ranks: int, place: int) -> None:
        self._segment, self._copies, self._ranks, self._place = segment, copies, ranks, place
        self._made_of: _ShardState | None = None  # the shard at the last gather over the replicas
        self._made_for: object = None
        self._steps = -1  # taken by optimizers then; none where a thread may be stepping
        self._reads = 0  # of the shard until then
        self.data = torch.empty(0)

    def follow(self, written: Written) -> None:
        """Takes over the segment's present buffer, and the versions of its shard."""
        if self._made_for != self._segment.made_for:
            self._made_of = None
        self._made_for = self._segment.made_for
        self._written, buffer = written, self._segment.gathered.data
        self.regions = list(buffer.chunk(self._copies))
        self._column = buffer.view(self._copies, self._ranks, -1)[:, self._place]
        if self.data.shape != self._column.shape:
            self._made_of = None
            with torch.inference_mode(False):
                self.data = torch.empty_like(self._column, memory_format=torch.contiguous_format)

    def is_outdated(self) -> bool:
        """Whether the shards may have other values now, as far as all ranks can tell alike.

        Within a backward the values are those of its forward, which optimizers' steps do not outdate: those
        of other units may run in a thread.
        """
        in_backward = graph_task() != -1
        if self._made_of is None or self._reads != self._segment.params.reads:
            return True
        if self._segment.params.extended and not in_backward:  # whose users' code makes values each time
            return True
        if self._made_of.is_outdated(self._written, not in_backward and steps_taken() != self._steps):
            return True
        if self._made_of.was_written_unseen:
            self._made_of = None
            raise ChangedBetweenError(
                f"'{self._segment.layout.fqns[0]}', or a parameter beside it in its unit, was written to "
                f"through `.data`, or another alias without a version counter, on rank {dist.get_rank()} "
                "while its values stayed gathered over the replicas (state_over_replicas=True): these are "
                "outdated. Write to the parameters themselves, under torch.no_grad()"
            )
        return False

    def begin(self) -> None:
        """Notes that a gather over the replicas begins; until `end` the part is outdated."""
        self._made_of, self._reads = None, self._segment.params.reads
        self._coming = _ShardState(self._segment.params, self._written)
        self._steps = steps_taken() if graph_task() == -1 else -1

    def end(self) -> None:
        """Notes that the gather is over, or in order before all that reads the part."""
        self._made_of = self._coming

    def take(self, copy: int) -> None:
        """Copies one copy's shard from the buffer."""
        self.data[copy].copy_(self._column[copy])

    def give(self) -> None:
        """Copies all shards to the buffer."""
        self._column.copy_(self.data)
