"""Memory of a unit's communication buffers: of its process group, or symmetric."""

from __future__ import annotations

from fsdp_wrap._comm import (
    SymmetricMemory,
    registered_memory,
    symmetric_memory,
)
from fsdp_wrap._core import OtherCommsError
from fsdp_wrap._custom_comms.transport import CustomTransport
from fsdp_wrap._params import Buffers
from fsdp_wrap._runtime import Unit


def allocate_by_group(unit: Unit, enable: bool) -> None:
    """Allocates a unit's communication buffers by its process group's allocator, if it has one, or not."""
    buffers, method = unit.buffers, "set_allocate_memory_from_process_group_for_comm()"
    if not unit.params:
        return
    _refuse_other_memory(unit, buffers, method)
    communicator = buffers.communicator
    if isinstance(communicator.memory, SymmetricMemory):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, which set_symm_mem_for_comm() was called on: call "
            "one of the two"
        )
    _require_unused(unit, buffers, method)
    group = communicator.group if enable else None
    buffers.allocate_in(None if group is None else registered_memory(group, communicator.device))


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Allocates a unit's communication buffers in symmetric memory; collective."""
    buffers, method = unit.buffers, "set_symm_mem_for_comm()"
    if backend != "NCCL":
        raise ValueError(f"{method} knows no backend but 'NCCL', not {backend!r}")
    if not unit.params:
        return
    _refuse_other_memory(unit, buffers, method)
    communicator = buffers.communicator
    if communicator.memory is not None and not isinstance(communicator.memory, SymmetricMemory):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, whose memory its process group allocates: call "
            "set_allocate_memory_from_process_group_for_comm(False) first"
        )
    group = communicator.group
    if group is not None:
        _require_unused(unit, buffers, method)
        buffers.allocate_in(symmetric_memory(group, communicator.device, f"{method} for {unit.name}"))


def _refuse_other_memory(unit: Unit, buffers: Buffers, method: str) -> None:
    if isinstance(buffers.transport, CustomTransport):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, whose memory is allocated by what "
            "set_custom_all_gather() or set_custom_reduce_scatter() was given: call one of them"
        )


def _require_unused(unit: Unit, buffers: Buffers, method: str) -> None:
    if buffers.gradients.accumulated or not buffers.become_sharded():
        raise RuntimeError(
            f"{method} must be called between steps: the parameters of {unit.name} are in use, or gradients "
            "that no_sync left wait for a reduction"
        )
