"""`HeldBy`: the ranks that share tensors; `Spread`: the cuts of one tensor; `Box`: rectangles in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_wrap._comm import ShardMesh, default_group, device_type_for, group_of, mesh_over
from fsdp_wrap._core import ceil_div


@dataclass(frozen=True, init=False)
class Intervals(Placement):
    """A placement: each rank holds an interval of the flattened tensor, perhaps not whole rows."""


@dataclass(frozen=True)
class Box:
    """A rectangular, contiguous part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int  # index of its first element in the flattened tensor

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts the interval [start, stop) of a flattened tensor into at most 2 x dimensions - 1 boxes, in order.

    An empty interval has no box, but a tensor without elements has one, of the whole shape.
    """
    if torch.Size(shape).numel() == 0 or (not shape and start < stop):
        yield Box((0,) * len(shape), shape, 0)
        return
    rows = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
    while start < stop:
        dim = next(dim for dim, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        offsets = tuple(start // row % size for row, size in zip(rows, shape))
        count = min(shape[dim] - offsets[dim], (stop - start) // rows[dim])
        yield Box(offsets, (*(1,) * dim, count, *shape[dim + 1 :]), start)
        start += count * rows[dim]


@dataclass(frozen=True)
class HeldBy:
    """The ranks that hold tensors between them, without a reference that keeps their process group alive.

    Attributes:
        ranks: Global ranks, in order.
        names: Name of the mesh's dimension, if it has one.
        replicated: Whether each of them holds everything.
        given: The user's mesh, if the ranks were given by one.
        reference: Returns their process group while that lives.
    """

    ranks: tuple[int, ...]
    device_type: str
    names: tuple[str, ...] | None = None
    replicated: bool = False
    given: DeviceMesh | None = field(default=None, compare=False)
    reference: Callable[[], Any] = field(default=lambda: None, compare=False)

    @classmethod
    def of(cls, mesh: ShardMesh, device: torch.device) -> HeldBy:
        """Returns the ranks that hold one copy of a unit between them; all replicas, if each has a copy."""
        ranks = mesh.shard or mesh.replicate
        assert ranks is not None
        names = None if mesh.given is None else mesh.given.mesh_dim_names
        return cls(
            tuple(ranks.members),
            device.type,
            names and names[-1:],
            replicated=mesh.shard is None,
            given=mesh.given,
            reference=ranks.reference,
        )

    @classmethod
    def everyone(cls) -> HeldBy:
        """Returns all ranks."""
        group = default_group("a piece of a sharded state dict")
        return cls(tuple(range(dist.get_world_size(group))), device_type_for(group))

    @property
    def size(self) -> int:
        """Number of ranks that hold one copy between them."""
        return 1 if self.replicated else len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group; raises RuntimeError where there is none any more."""
        return group_of(self.ranks, self.reference())

    @property
    def mesh(self) -> DeviceMesh:
        """The user's mesh, or one of one dimension."""
        return self.given or mesh_over(self.group, self.device_type, self.names)

    @property
    def described(self) -> tuple[Any, ...]:
        """Arguments that make an equal object in another process."""
        return self.ranks, self.device_type, self.names, self.replicated


@dataclass(frozen=True)
class Spread:
    """The cuts of a tensor in a buffer that is cut evenly between ranks.

    Attributes:
        first: Index of the tensor's first element in the buffer.
        length: Elements of the buffer on each rank.
    """

    held_by: HeldBy
    first: int
    length: int

    def bounds(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yields each rank's (start, stop) in a flattened tensor of so many elements."""
        if self.held_by.size == 1:
            yield 0, numel
            return
        for rank in range(self.held_by.size):
            begin = rank * self.length - self.first
            yield min(max(begin, 0), numel), min(max(begin + self.length, 0), numel)

    def placements(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Returns the placements of a `DTensor`: `Shard(0)` where every rank has just those rows."""
        others = [Replicate()] * (self.held_by.mesh.ndim - 1)
        if self.held_by.replicated:
            return (*others, Replicate())
        return (*others, Shard(0) if self._is_by_rows(shape) else Intervals())

    def _is_by_rows(self, shape: torch.Size) -> bool:
        numel = shape.numel()
        if numel == 0 or not shape:
            return False
        part = ceil_div(shape[0], self.held_by.size) * shape[1:].numel()
        ends = [min(rank * part, numel) for rank in range(self.held_by.size + 1)]
        return [*self.bounds(numel)] == [*zip(ends, ends[1:])]
