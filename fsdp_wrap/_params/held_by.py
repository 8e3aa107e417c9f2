"""`HeldBy`: the ranks that hold tensors between them; `Spread`: how they cut one; `Box`: parts of it."""

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
    """Each rank holds a contiguous interval of the flattened tensor, which need not be whole rows."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor that is contiguous in it.

    Attributes:
        offsets: Index of its first element.
        sizes: Its shape.
        first: Index of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.sizes).numel()


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts the interval [start, stop) of a flattened tensor into at most 2 x dimensions - 1 boxes, in order.

    An empty interval has none, save that of a tensor without elements: that has one, of the whole shape.
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
    """The ranks that hold tensors between them. Refers to no process group, which may so be destroyed.

    Attributes:
        ranks: As the default group counts them, in order.
        device_type: Of the devices on which they compute.
        names: Of the mesh's dimension, if it has one.
        replicated: Whether each of them holds everything.
        given: The mesh that the user gave them by.
        reference: Gives their process group while that lives, if it was known.
    """

    ranks: tuple[int, ...]
    device_type: str
    names: tuple[str, ...] | None = None
    replicated: bool = False
    given: DeviceMesh | None = field(default=None, compare=False)
    reference: Callable[[], Any] = field(default=lambda: None, compare=False)

    @classmethod
    def of(cls, mesh: ShardMesh, device: torch.device) -> HeldBy:
        """Returns the ranks that hold one copy of a unit between them; all that do, if each has a copy."""
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
        """How many ranks hold one copy between them."""
        return 1 if self.replicated else len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group.

        Raises:
            RuntimeError: If there is none any more, or none in this process.
        """
        return group_of(self.ranks, self.reference())

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the user gave, or one of one dimension."""
        return self.given or mesh_over(self.group, self.device_type, self.names)

    @property
    def described(self) -> tuple[Any, ...]:
        """The arguments that make the like of it in another process."""
        return self.ranks, self.device_type, self.names, self.replicated


@dataclass(frozen=True)
class Spread:
    """How ranks hold a tensor between them: each the next so many elements of the buffer in which it lies.

    Attributes:
        held_by: The ranks.
        first: Index in the buffer of the tensor's first element.
        length: How many elements of the buffer each rank holds.
    """

    held_by: HeldBy
    first: int
    length: int

    def bounds(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yields which elements of a flattened tensor of so many each rank holds."""
        if self.held_by.size == 1:
            yield 0, numel
            return
        for rank in range(self.held_by.size):
            begin = rank * self.length - self.first
            yield min(max(begin, 0), numel), min(max(begin + self.length, 0), numel)

    def placements(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Returns how a `DTensor` would tell it: `Shard(0)` where every rank has the rows that this means."""
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
