"""Full tensors from what the ranks hold, and from the first rank to all: one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator, Pending, deaths_told, make_communicator
from fsdp_wrap._core.torch_private import ShardedTensor
from fsdp_wrap._params import IntervalTensor, ParamHandle, assemble
from fsdp_wrap._runtime import Unit

__all__ = [
    "FirstRank",
    "FullValue",
    "copier",
    "full_values",
    "gather",
    "handles_of",
    "is_first_rank",
    "is_sharded",
    "offloaded",
    "unsharded",
    "used_by",
    "value_held_here",
]


def handles_of(units: Iterable[Unit]) -> list[ParamHandle]:
    """Returns the handles of the units that have one."""
    return [unit.handle for unit in units if unit.handle is not None]


def used_by(units: Iterable[Unit]) -> list[Unit]:
    """Returns units, before each those from which it borrows."""
    return list(dict.fromkeys(each for unit in units for each in (*unit.lenders, unit)))


@dataclass(frozen=True)
class FullValue:
    """A full tensor that ranks hold between them, in consecutive parts, and that can be gathered.

    Attributes:
        key: What it is: a name, say.
        shape: Of the full tensor.
        dtype: In which it is gathered.
        communicator: Of the ranks.
        lengths: How many elements each rank holds.
        write: Writes this rank's elements into a 1-D tensor.
    """

    key: Any
    shape: torch.Size
    dtype: torch.dtype
    communicator: Communicator
    lengths: Sequence[int]
    write: Callable[[torch.Tensor], object]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def travels_with(self, other: FullValue) -> bool:
        """Whether the two can be parts of one message from each rank."""
        same_ranks = self.communicator == other.communicator and self.communicator.size > 1
        return same_ranks and self.dtype == other.dtype


def gather(values: Sequence[FullValue]) -> tuple[list[Callable[[], torch.Tensor]], Pending]:
    """Issues one gather of values that travel together, or of one alone.

    Returns:
        For each value what makes, after the wait, the full tensor in memory of its own, once; and what to
        wait for. One alone arrives in its place; several arrive side by side and are copied from there.
    """
    communicator, dtype = values[0].communicator, values[0].dtype
    by_rank = [list(of_rank) for of_rank in zip(*(value.lengths for value in values))]
    lengths = [sum(of_rank) for of_rank in by_rank]
    arriving = communicator.empty(sum(lengths), dtype)

    def write(own: torch.Tensor) -> None:
        for value, part in zip(values, torch.split(own, by_rank[communicator.rank])):
            value.write(part)

    pending = communicator.all_gather_parts(arriving, lengths, write)
    if len(values) == 1:
        return [lambda: arriving.view(values[0].shape)], pending
    parts = [torch.split(of_rank, each) for of_rank, each in zip(torch.split(arriving, lengths), by_rank)]
    return [partial(_joined, value, of_value) for value, of_value in zip(values, zip(*parts))], pending


def _joined(value: FullValue, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    full = value.communicator.empty(value.shape.numel(), value.dtype)
    torch.cat(tuple(parts), out=full)
    return full.view(value.shape)


def full_values(handle: ParamHandle) -> list[FullValue]:
    """Returns a handle's parameters, by layout and index; in master dtype."""
    return [
        FullValue((layout, index), each.shape, layout.dtype, handle.communicator, lengths, copier(each.data))
        for layout in handle.layouts
        for index, (each, lengths) in enumerate(zip(layout.intervals(), layout.held_by_rank()))
    ]


def value_held_here(key: str, tensor: torch.Tensor) -> FullValue:
    """Returns a tensor that this rank has whole.

    Raises:
        RuntimeError: If it is on the meta device.
    """
    if tensor.is_meta:
        raise RuntimeError(f"'{key}' is on the meta device and has no values")
    alone = make_communicator(None, tensor.device)
    return FullValue(key, tensor.shape, tensor.dtype, alone, [tensor.numel()], copier(tensor))


def copier(source: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Returns what copies a tensor into one of as many elements."""
    return lambda out: out.view(source.shape).copy_(source.detach(), non_blocking=True)


def offloaded(tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
    """Returns a copy in memory of its own, on the host or where the tensor is."""
    return tensor.to("cpu", copy=True) if to_host else tensor.clone()


def is_sharded(value: Any) -> bool:
    """Whether a value is of one of torch's own kinds of sharded tensors."""
    return isinstance(value, (DTensor, ShardedTensor)) and not isinstance(value, IntervalTensor)


def unsharded(value: Any) -> Any:
    """Returns torch's own kinds of sharded tensors as full ones (collective), all else as it is."""
    if not is_sharded(value):
        return value
    if isinstance(value, DTensor):
        with deaths_told():
            return value.full_tensor()
    metadata = value.metadata()

    def write(full: torch.Tensor) -> None:
        for shard in value.local_shards():
            part = full
            for dim, (offset, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            ):
                part = part.narrow(dim, offset, size)
            part.copy_(shard.tensor)

    return assemble(metadata.size, metadata.tensor_properties.dtype, [value._process_group], write)


def is_first_rank(handles: Iterable[ParamHandle]) -> bool:
    """Whether this is the one rank that stands for all that hold these units (0, in the default group)."""
    for handle in handles:
        return handle.communicator.rank == 0 and handle.replicas.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0


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
