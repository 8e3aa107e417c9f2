"""A process group that communicates nothing, and a device that need not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import PLANNED, Accelerator, planning_for
from fsdp_wrap._core.torch_private import FakeProcessGroup, HashStore


class NoStream:
    """A stream or event of a device that does not exist; all of its work is done."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record_event(self, *_: Any) -> NoStream:
        """Returns a completed event."""
        return self

    def query(self) -> bool:
        """Says that the work is done."""
        return True

    def wait_stream(self, *_: Any) -> None:
        """Waits for nothing, like the methods below."""

    wait_event = synchronize = wait = record = wait_stream


class PlannedAccelerator(Accelerator):
    """An accelerator that need not exist."""

    def current_stream(self) -> Any:
        return NoStream()

    def record_time(self) -> Any:
        return NoStream()

    def new_stream(self, purpose: str) -> Any:
        return NoStream()

    @property
    def captures(self) -> bool:
        return False

    def prepare_to_ask(self) -> None:
        return None

    def new_pool(self, allocator: Any) -> Any:
        return None

    def new_symmetric_pool(self) -> Any:
        return None

    def allocating_in(self, pool: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def meet_in_symmetric_memory(self, tensor: torch.Tensor, group_name: str) -> None:
        return None


def _make_group(common: Any, options: Any) -> Any:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size)


@contextmanager
def _without_launcher() -> Iterator[None]:
    """Hides `LOCAL_RANK`, by which a mesh would choose a device that need not exist."""
    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        yield
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


@contextmanager
def world_of(ranks: int, rank: int, device_type: str) -> Iterator[None]:
    """Makes this process one rank of many on a type of device while the context is open.

    Raises:
        ValueError: If there is a process group.
    """
    if dist.is_initialized():
        raise ValueError(
            "plan() makes a process group of its own, and this process has one already: call plan() before "
            "torch.distributed.init_process_group() and not in setup(), or in another process"
        )
    devices = ["cpu"] if device_type == "cpu" else ["cpu", device_type]
    dist.Backend.register_backend(PLANNED, _make_group, extended_api=True, devices=devices)
    accelerator = None if device_type == "cpu" else PlannedAccelerator(torch.device(device_type, 0))
    with planning_for(device_type, accelerator), _without_launcher():
        dist.init_process_group(PLANNED, store=HashStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()
