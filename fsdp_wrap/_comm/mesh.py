"""The ranks that shard a unit, and those that hold replicas of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._comm.device import check_present
from fsdp_wrap._comm.groups import Ranks, default_group, groups_by_host, ranks_in
from fsdp_wrap._core import ShardingStrategy

HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard over some ranks and replicate over others."""


@dataclass(frozen=True)
class ShardMesh:
    """The ranks that hold one copy of a unit between them, and those that hold the same part of other copies.

    `shard` is None where every rank holds all parameters, `replicate` where there is one copy. `given` is the
    user's mesh. `copies` are the ranks of the copies where `shard` are those of all of them: they hold the
    state between them, and each copy computes by itself.
    """

    shard: Ranks | None
    replicate: Ranks | None
    given: DeviceMesh | None = None
    copies: ShardMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether all other ranks are synchronised with this one."""
        return all(ranks.rank == 0 for ranks in self.axes)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups in use; none for stand-ins."""
        return [ranks.group for ranks in self.axes if ranks.communicate]

    @property
    def axes(self) -> list[Ranks]:
        """The ranks over which parameters are sharded, and those over which they are replicated."""
        return [ranks for ranks in (self.shard, self.replicate) if ranks is not None]


def resolve_mesh(process_group: Any, device_mesh: Any, strategy: ShardingStrategy) -> ShardMesh:
    """Finds the groups that a strategy shards and replicates over.

    `process_group` is a `ProcessGroup` or a stand-in, a (shard, replicate) pair for hybrid strategies, or
    None for the default group. `device_mesh` has one dimension, or two (replicate, shard) for hybrid
    strategies. Raises a ValueError where both are given, nothing fits the strategy, ranks to shard over are
    in another order than their process group's, or this rank is not part of them; a TypeError for other
    types.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    several = isinstance(process_group, (tuple, list))
    groups: tuple[Any, ...] = tuple(process_group) if several else (process_group,)
    if device_mesh is not None:
        groups = _mesh_groups(device_mesh, strategy is not ShardingStrategy.NO_SHARD)
        check_present(torch.device(device_mesh.device_type), "device_mesh")
    if strategy in HYBRID_STRATEGIES:
        groups = groups_by_host(default_group("FullyShardedDataParallel")) if groups == (None,) else groups
        if len(groups) != 2:
            raise ValueError(
                f"{strategy.name} takes a (shard, replicate) pair of process groups or a device_mesh of two "
                "dimensions (replicate, shard), or neither, in which case it shards within each host"
            )
        return ShardMesh(ranks_in(groups[0]), ranks_in(groups[1]), device_mesh)
    if len(groups) != 1:
        raise ValueError(
            f"{strategy.name} takes one process group or a one-dimensional device_mesh, but got "
            f"{len(groups)} groups or dimensions; HYBRID_SHARD takes two"
        )
    ranks = ranks_in(default_group("FullyShardedDataParallel") if groups[0] is None else groups[0])
    whole = strategy is ShardingStrategy.NO_SHARD
    return ShardMesh(None if whole else ranks, ranks if whole else None, device_mesh)


def ranks_of(mesh: DeviceMesh, shards: bool = True) -> ShardMesh:
    """Returns the ranks of a mesh of one dimension (shard) or two (replicate, shard).

    With `shards=False` its one dimension replicates. Raises a ValueError for more dimensions, for ranks in
    another order than their process group's, or if this rank is not part of it; a TypeError for anything
    else.
    """
    groups = _mesh_groups(mesh, shards)
    if len(groups) > 2:
        raise ValueError(
            f"the mesh to shard over has one dimension (shard) or two (replicate, shard), and {mesh} has "
            f"{mesh.ndim}: pass a part of it, such as mesh['dp']"
        )
    if not shards:
        return ShardMesh(None, ranks_in(groups[0]), mesh)
    return ShardMesh(ranks_in(groups[0]), ranks_in(groups[1]) if len(groups) == 2 else None, mesh)


def _mesh_groups(mesh: Any, shards: bool) -> tuple[dist.ProcessGroup, ...]:
    """Returns the mesh's groups, shard first; torch sorts the ranks of those, and not of the mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}")
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of device_mesh {mesh}: wrap only on its ranks")
    groups = tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)))
    row, members = mesh.mesh[tuple(here[:-1])].tolist(), dist.get_process_group_ranks(groups[0])
    if row == members == sorted(row):  # or other ranks would raise alone
        row = next((each for each in mesh.mesh.reshape(-1, len(row)).tolist() if each != sorted(each)), row)
        members = sorted(row)
    if shards and row != members:
        raise ValueError(
            f"{mesh} has the ranks {row} to shard over, and its process group has them as {members}: parts "
            "would change places. Give them in ascending order"
        )
    return groups
