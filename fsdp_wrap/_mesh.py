"""Process groups, ranks and the device of a unit (all frozen once resolved)."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_wrap.api import ShardingStrategy

__all__ = [
    "HYBRID_STRATEGIES",
    "Ranks",
    "ShardMesh",
    "default_mesh",
    "device_of",
    "neighbours",
    "ranks_of",
    "resolve_device",
    "resolve_mesh",
]

HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard over some ranks and replicate over others."""


@dataclass(frozen=True)
class Ranks:
    """A process group and this process's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class ShardMesh:
    """Which ranks hold one copy of a unit between them, and which hold the same part of other copies.

    Attributes:
        shard: Ranks over which parameters are sharded; None where every rank holds all of them.
        replicate: Ranks over which they are replicated; None where there is one copy.
    """

    shard: Ranks | None
    replicate: Ranks | None

    @property
    def size(self) -> int:
        """Ranks that contribute to a gradient."""
        return (self.shard.size if self.shard else 1) * (self.replicate.size if self.replicate else 1)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that all others are synchronised with."""
        return all(ranks.rank == 0 for ranks in (self.shard, self.replicate) if ranks is not None)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups in use."""
        return [ranks.group for ranks in (self.shard, self.replicate) if ranks is not None]


def resolve_mesh(process_group: Any, device_mesh: Any, strategy: ShardingStrategy) -> ShardMesh:
    """Finds the groups that a strategy shards and replicates over.

    Args:
        process_group: A `ProcessGroup`, for hybrid strategies a (shard, replicate) pair, or None for the
            default group.
        device_mesh: A `DeviceMesh` of one dimension, for hybrid strategies of two (replicate, shard), or
            None.
        strategy: What to shard.

    Raises:
        ValueError: If both are given, torch.distributed is not initialised, they do not fit the strategy,
            or this rank is not part of them.
        TypeError: If either is of another type.
    """
    _require_process_group("FullyShardedDataParallel")
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    if device_mesh is not None:
        groups = _mesh_groups(device_mesh)
    else:
        groups = tuple(process_group) if isinstance(process_group, (tuple, list)) else (process_group,)
    if strategy in HYBRID_STRATEGIES:
        return _hybrid_mesh(groups, strategy)
    if len(groups) != 1:
        raise ValueError(
            f"{strategy.name} takes one process group or a one-dimensional device_mesh, but got "
            f"{len(groups)} groups or dimensions; HYBRID_SHARD takes two"
        )
    ranks = _ranks(dist.group.WORLD if groups[0] is None else groups[0])
    return ShardMesh(None, ranks) if strategy is ShardingStrategy.NO_SHARD else ShardMesh(ranks, None)


def _require_process_group(what: str) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{what} needs a process group, and there is none: call "
            "torch.distributed.init_process_group() before wrapping (torchrun sets what it reads)"
        )


def default_mesh() -> DeviceMesh:
    """Returns the one-dimensional mesh of all ranks, on the accelerator if they can communicate from it.

    Raises:
        ValueError: If there is no process group.
    """
    _require_process_group("fully_shard")
    assert dist.group.WORLD is not None
    mesh = _default_mesh_of.get(dist.group.WORLD)
    if mesh is None:
        known = {device.type for device in dist.group.WORLD._device_types}
        kind = _accelerator_type() if _accelerator_type() in known else "cpu"
        mesh = _default_mesh_of[dist.group.WORLD] = init_device_mesh(kind, (dist.get_world_size(),))
    return mesh


_default_mesh_of: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> ShardMesh:
    """Returns the ranks of a mesh of one dimension (shard) or two (replicate, shard).

    Raises:
        ValueError: If it has more dimensions, or this rank is not part of it.
        TypeError: If it is no mesh.
    """
    groups = _mesh_groups(mesh)
    if len(groups) > 2:
        raise ValueError(f"a mesh has one dimension (shard) or two (replicate, shard), not {mesh.ndim}")
    return ShardMesh(_ranks(groups[0]), _ranks(groups[1]) if len(groups) == 2 else None)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this rank on which a mesh's tensors are."""
    device = _normalise(mesh.device_type)
    assert device is not None
    return device


def neighbours(ranks: Ranks, size: int) -> Ranks:
    """Returns the group of so many ranks that stand side by side in a group; collective among them.

    Raises:
        ValueError: If the group cannot be cut so.
    """
    if not 1 < size < ranks.size or ranks.size % size:
        raise ValueError(
            f"reshard_after_forward={size} must divide the {ranks.size} ranks over which is sharded, "
            f"and be neither 1 (which is False) nor {ranks.size} (which is True)"
        )
    by_size = _neighbours_in.setdefault(ranks.group, {})
    if size not in by_size:
        first = ranks.rank // size * size
        members = dist.get_process_group_ranks(ranks.group)[first : first + size]
        by_size[size] = dist.new_group(members, use_local_synchronization=True)
    return _ranks(by_size[size])


_neighbours_in: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Any]] = weakref.WeakKeyDictionary()


def _hybrid_mesh(groups: tuple[Any, ...], strategy: ShardingStrategy) -> ShardMesh:
    if groups == (None,):
        groups = _groups_by_host(dist.get_world_size())
    if len(groups) != 2:
        raise ValueError(
            f"{strategy.name} takes a (shard, replicate) pair of process groups or a device_mesh of two "
            "dimensions (replicate, shard), or neither, in which case it shards within each host"
        )
    return ShardMesh(_ranks(groups[0]), _ranks(groups[1]))


def _groups_by_host(world_size: int) -> tuple[Any, ...]:
    """Returns the (shard, replicate) groups that follow from the number of ranks per host."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local < 1 or world_size % local:
        raise ValueError(
            f"cannot shard within hosts: LOCAL_WORLD_SIZE={local} does not divide the {world_size} ranks; "
            "pass a (shard, replicate) pair as process_group or a device_mesh of two dimensions"
        )
    assert dist.group.WORLD is not None
    by_size = _groups_by_host_of.setdefault(dist.group.WORLD, {})
    if local not in by_size:
        by_size[local] = _make_groups_by_host(world_size, local)
    return by_size[local]


# All units share the groups that were made for a default process group, as long as that lives.
_groups_by_host_of: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[Any, ...]]]
_groups_by_host_of = weakref.WeakKeyDictionary()


def _make_groups_by_host(world_size: int, local: int) -> tuple[Any, ...]:
    rank = dist.get_rank()
    if rank == 0:
        warnings.warn(
            f"no groups were given: sharding within each host ({local} ranks by LOCAL_WORLD_SIZE) and "
            f"replicating across {world_size // local}",
            stacklevel=2,
        )
    shard = [dist.new_group(range(start, start + local)) for start in range(0, world_size, local)]
    replicate = [dist.new_group(range(place, world_size, local)) for place in range(local)]
    return shard[rank // local], replicate[rank % local]


def _mesh_groups(mesh: Any) -> tuple[dist.ProcessGroup, ...]:
    """Returns the mesh's groups, shard first."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of device_mesh {mesh}: wrap only on its ranks")
    return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)))


def _ranks(group: Any) -> Ranks:
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or None, not {type(group).__name__}"
        )
    if outside or dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the process_group that it was given: wrap only on the "
            "ranks of the group, or pass each rank the group that it belongs to"
        )
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def resolve_device(
    tensors: Iterable[tuple[str, torch.Tensor]], device_id: int | torch.device | None, mesh: ShardMesh
) -> torch.device:
    """Chooses where a unit computes.

    `device_id` decides if given; otherwise the device of the tensors, save that tensors on the CPU go to
    the current accelerator where the group cannot communicate from the CPU (NCCL alone). Where all are on
    the meta device, it is the current accelerator if the group can communicate from it.

    Args:
        tensors: The module's parameters and buffers by name.
        device_id: The user's choice.
        mesh: The ranks to communicate with.

    Raises:
        ValueError: If the tensors are spread over several devices and `device_id` does not say where
            they belong, or are already on an accelerator other than `device_id`.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in tensors:
        found.setdefault(tensor.device, name)
    only_meta = set(found) == {torch.device("meta")}
    found.pop(torch.device("meta"), None)
    wanted = _normalise(device_id)
    if wanted is None:
        if len(found) > 1:
            places = ", ".join(f"'{name}' on {device}" for device, name in found.items())
            raise ValueError(f"all tensors of a unit must be on one device, but {places}; pass device_id")
        wanted = next(iter(found), torch.device("cpu"))
        known = _device_types(mesh)
        stays = wanted.type in known and not (only_meta and _accelerator_type() in known)
        return wanted if stays else _current_accelerator(wanted)
    for device, name in found.items():
        if device.type != "cpu" and device != wanted:
            raise ValueError(f"device_id is {wanted}, but '{name}' is on {device}; change one of the two")
    return wanted


def _normalise(device_id: int | torch.device | str | None) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, int):
        device_id = torch.device(_accelerator_type(), device_id)
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" compares unequal to what tensors report
    return (
        device
        if device.index is not None
        else torch.device(device.type, torch.accelerator.current_device_index())
    )


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _current_accelerator(device: torch.device) -> torch.device:
    if device.type == "cpu" and torch.accelerator.is_available():
        return torch.device(_accelerator_type(), torch.accelerator.current_device_index())
    return device


def _device_types(mesh: ShardMesh) -> set[str]:
    return {device.type for group in mesh.groups for device in group._device_types}
