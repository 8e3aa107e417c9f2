"""Memory from which a process group sends faster: its own allocator's, and symmetric memory (NCCL)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.device import Accelerator, accelerator_of
from fsdp_wrap._comm.groups import once_for
from fsdp_wrap._core import UnfitBackendError


class GroupMemory:
    """Memory that the process group's backend allocates and registers."""

    def __init__(self, accelerator: Accelerator, pool: Any) -> None:
        self._accelerator, self._pool = accelerator, pool

    def allocating(self) -> AbstractContextManager[object]:
        """Lets this thread allocate there while the context is open."""
        return self._accelerator.allocating_in(self._pool)

    def admit(self, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Prepares tensors of this memory for a collective, alike on all ranks."""
        return None


class SymmetricMemory(GroupMemory):
    """Memory that lies alike on all ranks, so that copy engines or kernels reach it from any of them."""

    def admit(self, tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
        for tensor in tensors:
            self._accelerator.meet_in_symmetric_memory(tensor, group.group_name)


def registered_memory(group: dist.ProcessGroup, device: torch.device) -> GroupMemory | None:
    """Returns the memory of a group's own allocator; None where the backend has none for tensors."""
    accelerator, backend = accelerator_of(device), _backend_of(group, device)
    allocates = accelerator is not None and backend is not None and backend.supports_tensor_alloc(device)
    # Without the method it cannot serve memory that comes and goes.
    if accelerator is None or not allocates or getattr(backend, "register_mem_pool", None) is None:
        return None

    def make() -> GroupMemory:
        pool = accelerator.new_pool(backend.mem_allocator)
        backend.register_mem_pool(pool)  # with its later growth
        return GroupMemory(accelerator, pool)

    return once_for(group, ("registered memory", device), make)


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, user: str) -> SymmetricMemory:
    """Returns memory that lies alike on all ranks of a group; collective at first.

    Raises an UnfitBackendError, which names `user`, if the group does not communicate by NCCL on this device.
    """
    accelerator, backend = accelerator_of(device), _backend_of(group, device)
    name = "" if backend is None else backend.name()
    if accelerator is None or name != "nccl":
        raise UnfitBackendError(
            f"{user} on rank {dist.get_rank()}: symmetric memory is NCCL's, and the group communicates by "
            f"{name or 'no known backend'} on {device}; initialise it with backend='nccl' and shard on a "
            "CUDA device, or leave the call out"
        )

    def make() -> SymmetricMemory:
        pool = accelerator.new_symmetric_pool()
        # Tensors meet by the group's communicator, which the first collective makes.
        dist.barrier(group=group)
        return SymmetricMemory(accelerator, pool)

    return once_for(group, ("symmetric memory", device), make)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None
