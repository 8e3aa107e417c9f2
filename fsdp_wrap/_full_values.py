"""Full tensors from what the ranks hold, and from the first rank to all: one segment or tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._interval_tensor import assemble
from fsdp_wrap._layout import unpack
from fsdp_wrap._segment import Segment
from fsdp_wrap._unit import Unit

__all__ = ["FirstRank", "gathered", "handles_of", "is_first_rank", "is_sharded", "offloaded", "unsharded"]


def handles_of(units: Iterable[Unit]) -> list[ParamHandle]:
    """Returns the handles of the units that have one."""
    return [unit.handle for unit in units if unit.handle is not None]


@contextmanager
def gathered(
    handle: ParamHandle, segment: Segment, dtype: torch.dtype, write: Callable[[torch.Tensor], None]
) -> Iterator[list[torch.Tensor]]:
    """Gathers something of one segment's size, for as long as the context is open.

    Args:
        handle: Owner of the segment.
        segment: Gives the layout.
        dtype: Of what is gathered.
        write: Writes this rank's part, of the shard's size.

    Yields:
        Views of one buffer, one per original parameter, in its shape; they must not be used afterwards.
    """
    buffer = handle.communicator.buffer(segment.layout.numel, dtype)
    own = handle.communicator.own_part(buffer.tensor)
    handle.communicator.all_gather([buffer.tensor], lambda: write(own)).wait()
    yield segment.layout.views(unpack(segment.layout, buffer.tensor))
    buffer.free()  # not left to whoever still holds the tensor, such as a backend's thread


def offloaded(tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
    """Returns a copy in memory of its own, on the host or where the tensor is."""
    return tensor.to("cpu", copy=True) if to_host else tensor.clone()


def is_sharded(value: Any) -> bool:
    """Whether a value is of one of torch's own kinds of sharded tensors."""
    return isinstance(value, (DTensor, ShardedTensor))


def unsharded(value: Any) -> Any:
    """Returns torch's own kinds of sharded tensors as full ones (collective), all else as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    metadata = value.metadata()

    def write(full: torch.Tensor) -> None:
        for shard in value.local_shards():
            part = full
            for dim, (offset, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            ):
                part = part.narrow(dim, offset, size)
            part.copy_(shard.tensor)

    def combine(data: torch.Tensor) -> None:
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=value._process_group)

    device = dist.distributed_c10d._get_pg_default_device(value._process_group)
    like = torch.empty(1, dtype=metadata.tensor_properties.dtype, device=device).expand(metadata.size)
    return assemble(like, write, combine)


def is_first_rank(handles: Iterable[ParamHandle]) -> bool:
    """Whether this is the one rank that stands for all that hold these units (0, in the default group)."""
    for handle in handles:
        return handle.communicator.rank == 0 and handle.replicas.rank == 0
    return dist.get_rank() == 0


class FirstRank:
    """The way from the first rank to all that hold a unit: over the replicas, then within each copy."""

    def __init__(self, handles: Iterable[ParamHandle]) -> None:
        handles = list(handles)
        self.is_here = is_first_rank(handles)
        self._steps: list[Communicator] = [handles[0].replicas, handles[0].communicator] if handles else []

    def object(self, value: Any) -> Any:
        """Returns the first rank's value, which must be small and picklable."""
        for communicator in self._steps:
            value = communicator.broadcast_object(value)
        return value

    def tensor(self, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns the first rank's tensor; the others pass None."""
        device = self._steps[0].device if self._steps else torch.device("cpu")
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=device)
        value = value.to(device).contiguous()
        for communicator in self._steps:
            communicator.broadcast(value.view(-1).view(torch.uint8) if value.numel() else value)
        return value
