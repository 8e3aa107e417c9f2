"""Chooses the device on which a unit computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["device_of", "device_type_for", "resolve_device"]


def resolve_device(
    tensors: Iterable[tuple[str, torch.Tensor]],
    device_id: int | torch.device | None,
    groups: Iterable[dist.ProcessGroup],
) -> torch.device:
    """Chooses where a unit computes.

    `device_id` decides if given; otherwise the device of the tensors, save that tensors on the CPU go to
    the current accelerator where the groups cannot communicate from the CPU (NCCL alone). Where all are on
    the meta device, it is the current accelerator if the groups can communicate from it.

    Args:
        tensors: The module's parameters and buffers by name.
        device_id: The user's choice.
        groups: The process groups to communicate in.

    Raises:
        ValueError: If the tensors are spread over several devices and `device_id` does not say where
            they belong, or are already on an accelerator other than `device_id`.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in tensors:
        found.setdefault(tensor.device, name)
    only_meta = set(found) == {torch.device("meta")}
    found.pop(torch.device("meta"), None)
    if device_id is None:
        return _device_by_tensors(found, only_meta, groups)
    wanted = _normalise(device_id)
    for device, name in found.items():
        if device.type != "cpu" and device != wanted:
            raise ValueError(f"device_id is {wanted}, but '{name}' is on {device}; change one of the two")
    return wanted


def _device_by_tensors(
    found: dict[torch.device, str], only_meta: bool, groups: Iterable[dist.ProcessGroup]
) -> torch.device:
    if len(found) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in found.items())
        raise ValueError(f"all tensors of a unit must be on one device, but {places}; pass device_id")
    device = next(iter(found), torch.device("cpu"))
    known, accelerator = _device_types(groups), _accelerator_type()
    leaves_the_cpu = "cpu" not in known or (only_meta and accelerator in known)
    if device.type == "cpu" and leaves_the_cpu and torch.accelerator.is_available():
        return _normalise(accelerator)
    return device


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this rank on which a mesh's tensors are."""
    return _normalise(mesh.device_type)


def device_type_for(group: dist.ProcessGroup) -> str:
    """Returns the type of device for tensors of a group: an accelerator's if it can communicate from it."""
    accelerator = _accelerator_type()
    return accelerator if accelerator in _device_types([group]) else "cpu"


def _normalise(device_id: int | torch.device | str) -> torch.device:
    """Completes a device: a number is an accelerator's index, an accelerator without one the current."""
    if isinstance(device_id, int):
        device_id = torch.device(_accelerator_type(), device_id)
    device = torch.device(device_id)
    if device.type == "cpu":
        return torch.device("cpu")  # "cpu:0" compares unequal to what tensors report
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _device_types(groups: Iterable[dist.ProcessGroup]) -> set[str]:
    return {device.type for group in groups for device in group._device_types}
