"""`HeldBy`: the ranks that hold tensors between them, as a mesh, and how they cut what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_wrap._boxes import Box, boxes_of
from fsdp_wrap._compute_device import device_type_for
from fsdp_wrap._groups import default_group, group_of, mesh_over
from fsdp_wrap._mesh import ShardMesh

__all__ = ["HeldBy", "Intervals", "Spread"]


class Intervals(Placement):
    """Each rank holds a contiguous interval of the flattened tensor, which need not be whole rows."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals)

    def __hash__(self) -> int:
        return hash(Intervals)

    def __repr__(self) -> str:
        return "Intervals()"


class HeldBy:
    """The ranks that hold tensors between them. Refers to no process group, which may so be destroyed.

    Args:
        ranks: As the default group counts them, in order.
        device_type: Of the devices on which they compute.
        names: Of the mesh's dimension, if it has one.
        replicated: Whether each of them holds everything.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device_type: str,
        names: tuple[str, ...] | None = None,
        replicated: bool = False,
    ) -> None:
        self.ranks, self.replicated = tuple(ranks), replicated
        self._device_type, self._names = device_type, names
        self._given: DeviceMesh | None = None
        self._reference: Any = lambda: None

    @classmethod
    def of(cls, mesh: ShardMesh, device: torch.device) -> HeldBy:
        """Returns the ranks that hold one copy of a unit between them; all that do, if each has a copy."""
        ranks = mesh.shard or mesh.replicate
        assert ranks is not None
        names = None if mesh.given is None else mesh.given.mesh_dim_names
        self = cls(ranks.members, device.type, names and names[-1:], replicated=mesh.shard is None)
        self._given, self._reference = mesh.given, ranks.reference
        return self

    @classmethod
    def everyone(cls) -> HeldBy:
        """Returns all ranks."""
        group = default_group("a piece of a sharded state dict")
        return cls(range(dist.get_world_size(group)), device_type_for(group))

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
        return group_of(self.ranks, self._reference())

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the user gave, or one of one dimension."""
        return self._given or mesh_over(self.group, self._device_type, self._names)

    @property
    def described(self) -> tuple[Any, ...]:
        """The arguments that make the like of it in another process."""
        return self.ranks, self._device_type, self._names, self.replicated


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
        part = -(-shape[0] // self.held_by.size) * shape[1:].numel()
        ends = [min(rank * part, numel) for rank in range(self.held_by.size + 1)]
        return [*self.bounds(numel)] == [*zip(ends, ends[1:])]

    def boxes(self, shape: torch.Size) -> Iterator[tuple[int, Box]]:
        """Yields (rank, box) of all boxes of all ranks, as the default group counts them."""
        for rank, (start, stop) in zip(self.held_by.ranks, self.bounds(shape.numel())):
            for box in boxes_of(tuple(shape), start, stop):
                yield rank, box
