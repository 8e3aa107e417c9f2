"""Meshes flattened: the ranks of all copies hold the state that the copies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._building import over_replicas
from fsdp_wrap._comm import (
    CARRY_NOTHING,
    Communicator,
    Ranks,
    ShardMesh,
    default_group,
    device_type_for,
    group_over,
    make_communicator,
    mesh_over,
    ranks_in,
)
from fsdp_wrap._core import DataParallelMeshDims
from fsdp_wrap._core.torch_private import flattened_mesh
from fsdp_wrap._params import Buffers, DataMesh
from fsdp_wrap._state_over_replicas.transport import StagedTransport

_PASS = "pass a mesh (replicate, shard) of ranks in ascending order, as init_device_mesh makes it"


@over_replicas.fill
class StateOverReplicas:
    """The implementation of `state_over_replicas=True`."""

    @staticmethod
    def transport(within: Communicator, across: Communicator) -> Callable[[Buffers], Any]:
        """Returns a function that makes the transport of a unit's buffers; see `StagedTransport`."""
        return attrgetter("communicator") if across.size == 1 else partial(StagedTransport, within, across)

    @staticmethod
    def flat_ranks(copies: ShardMesh, user: str) -> ShardMesh:
        """Returns all ranks of a mesh as those that hold one copy; collective where it makes a group."""
        within, across = copies.shard, copies.replicate
        if within is None or across is None:
            raise ValueError(
                f"state_over_replicas=True of {user} shards state over replicas, and there are none: pass "
                "sharding_strategy=ShardingStrategy.HYBRID_SHARD with two groups or a mesh of two dimensions"
            )
        mesh = None if copies.given is None else _flattened(copies.given, user)
        group = _union(within, across, user) if mesh is None else mesh.get_group()
        return ShardMesh(ranks_in(group), None, mesh, copies)

    @staticmethod
    def flat_mesh(data: DataMesh, user: str) -> DataMesh:
        """Returns the same ranks in one dimension that shards; collective where it makes a group."""
        mesh, dims = data.mesh, data.dims
        if mesh.ndim == 1 or not data.shards:
            raise ValueError(
                f"state_over_replicas=True of {user} shards state over replicas, and {mesh} has none: {_PASS}"
            )
        if dims is not None and data.whole is not None:
            _check_order(mesh.mesh.flatten().tolist(), user)
            names = (*dims.replicate_names, *dims.shard_names)
            flat = DataMesh.within(data.whole, DataParallelMeshDims(shard=names))
            return DataMesh(flat.mesh, flat.whole, flat.dims, copies=mesh)
        flattened = _flattened(mesh, user)
        if flattened is None:
            copies = data.ranks
            assert copies.shard is not None and copies.replicate is not None
            flattened = mesh_over(_union(copies.shard, copies.replicate, user), mesh.device_type)
        return DataMesh(flattened, copies=mesh)


def _flattened(mesh: DeviceMesh, user: str) -> DeviceMesh | None:
    """Returns a mesh in one dimension; None where it has no names, by which torch flattens."""
    _check_order(mesh.mesh.flatten().tolist(), user)
    names = mesh.mesh_dim_names
    return None if names is None else flattened_mesh(mesh, "_".join(names))


def _union(within: Ranks, across: Ranks, user: str) -> dist.ProcessGroup:
    """Returns the group of the ranks of all copies, of which this rank knows its own and its counterparts."""
    if not (within.communicate and across.communicate):
        raise ValueError(
            f"state_over_replicas=True of {user} needs process groups that communicate, not stand-ins: pass "
            "two of torch.distributed, or a device_mesh"
        )
    device, known = torch.device(device_type_for(within.group)), _ranks_of.setdefault(within.group, {})
    members = tuple(across.members)
    if members not in known:
        known[members] = _ranks_of_copies(within, across, device)
    _check_order(known[members], user)
    world = default_group(user)
    whole = len(known[members]) == dist.get_world_size(world)
    return world if whole else group_over(known[members], device)


def _ranks_of_copies(within: Ranks, across: Ranks, device: torch.device) -> list[int]:
    """Returns the ranks of all copies, copy by copy, gathered from this rank's counterparts; collective."""
    if dist.get_backend(within.group) in CARRY_NOTHING or across.size == 1:
        copies = [
            [first - across.members[across.rank] + member for member in within.members]
            for first in across.members
        ]
    else:
        copies = make_communicator(across, device, False).all_gather_object(within.members)
    return [rank for copy in copies for rank in copy]


_ranks_of: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
"""The ranks of all copies, by this copy's group and this rank's counterparts."""


def _check_order(ranks: Sequence[int], user: str) -> None:
    """Refuses ranks that are not in the order of the copies and, in a copy, of its parts."""
    if list(ranks) != sorted(set(ranks)):
        raise ValueError(
            f"state_over_replicas=True of {user} counts ranks copy by copy, and these are {list(ranks)}: "
            f"{_PASS}"
        )
