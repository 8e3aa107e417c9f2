"""Process groups, ranks and the device of a unit (all frozen once resolved)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardMesh", "resolve_device", "resolve_mesh"]


@dataclass(frozen=True)
class ShardMesh:
    """The ranks over which a unit is sharded.

    Attributes:
        group: Their process group.
        rank: This process's rank in it.
        size: How many ranks it has.
    """

    group: dist.ProcessGroup
    rank: int
    size: int


def resolve_mesh(process_group: Any, device_mesh: Any) -> ShardMesh:
    """Finds the group to shard over.

    Args:
        process_group: A `ProcessGroup`, or None for the default group.
        device_mesh: A one-dimensional `DeviceMesh`, or None.

    Raises:
        ValueError: If both are given, torch.distributed is not initialised, the mesh has another number
            of dimensions, or this rank is not part of the group.
        TypeError: If either is of another type.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "FullyShardedDataParallel needs a process group, and there is none: call "
            "torch.distributed.init_process_group() before wrapping (torchrun sets what it reads)"
        )
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    group = process_group if device_mesh is None else _mesh_group(device_mesh)
    group = _checked(dist.group.WORLD if group is None else group)
    return ShardMesh(group, dist.get_rank(group), dist.get_world_size(group))


def _mesh_group(mesh: Any) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh must be one-dimensional, this one has {mesh.ndim} dimensions")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of device_mesh {mesh}: wrap only on its ranks")
    return mesh.get_group()


def _checked(group: Any) -> dist.ProcessGroup:
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
    assert isinstance(group, dist.ProcessGroup)
    return group


def resolve_device(
    tensors: Iterable[tuple[str, torch.Tensor]], device_id: int | torch.device | None, mesh: ShardMesh
) -> torch.device:
    """Chooses where a unit computes.

    `device_id` decides if given; otherwise the device of the tensors, save that tensors on the CPU go to
    the current accelerator where the group cannot communicate from the CPU (NCCL alone).

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
    wanted = _normalise(device_id)
    if wanted is None:
        if len(found) > 1:
            places = ", ".join(f"'{name}' on {device}" for device, name in found.items())
            raise ValueError(f"all tensors of a unit must be on one device, but {places}; pass device_id")
        wanted = next(iter(found), torch.device("cpu"))
        return wanted if wanted.type in _device_types(mesh.group) else _current_accelerator(wanted)
    for device, name in found.items():
        if device.type not in ("cpu", "meta") and device != wanted:
            raise ValueError(f"device_id is {wanted}, but '{name}' is on {device}; change one of the two")
    return wanted


def _normalise(device_id: int | torch.device | str | None) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, int):
        return torch.device(_accelerator_type(), device_id)
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


def _device_types(group: dist.ProcessGroup) -> set[str]:
    return {device.type for device in group._device_types}
