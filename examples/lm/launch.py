"""Where this process stands among the others, and what they decide together."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RunError(RuntimeError):
    """A run that cannot go on; raised on every rank alike."""


@dataclass(frozen=True)
class World:
    """This process's rank and device, and the number of processes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start() -> World:
    """Join the process group that torchrun describes; without torchrun, be a group of one.

    Computes on accelerators if there is one for each process of this host, else on the CPU.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(max(1, _cores() // local_size))
    on_gpu = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return World(dist.get_rank(), dist.get_world_size(), device)


def finish() -> None:
    """Leave the process group, for good.

    Gloo's threads must end before the interpreter does, and they run for as long as anything holds the group:
    a model does, and being part of reference cycles it waits for the collector.
    """
    gc.collect()
    dist.destroy_process_group()


def on_first_rank(decide: Callable[[], T]) -> T:
    """Let rank 0 decide and every rank hear the same: its result, or its error."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except (RunError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer)
    result, problem = answer
    if problem is not None:
        raise RunError(problem)
    return result


def on_first_of_host(do: Callable[[], None]) -> None:
    """Let one rank of each host do something, and all wait for it."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        do()
    dist.barrier()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held: allocated on an accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
