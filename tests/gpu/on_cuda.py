"""What the tests on a GPU share.

Every test has a parameter `device`. With "cuda" it needs a GPU, one for each rank, and NCCL. With "cpu" the
same body runs over gloo, so that a machine without a GPU shows whether the test itself is sound.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bed import ranks
from bed.paths import ROOT
from models import loss_of, tokens

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.implementations import over_the_group
from benchmarks.meters import tensors

__all__ = ["over_the_group"]

needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def only_cuda(test: Callable[..., None]) -> Callable[..., None]:
    for mark in needs_cuda:
        test = mark(test)
    return test


SIZES = [1] + ([2] if torch.cuda.device_count() > 1 else [])
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
_FIRST_TIME = 240.0
"""Seconds that a job may take: the first on a GPU makes a context, loads kernels and starts NCCL."""


def by_device(body: Callable[..., None]) -> Callable[..., None]:
    return ranks(*SIZES, timeout=_FIRST_TIME, backend=_backend)(body)


def _backend(others: Mapping[str, Any]) -> str:
    """NCCL alone, as most jobs have it; with a parameter `offload` that is true, gloo beside it."""
    if others["device"] == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if others.get("offload") else "nccl"


def on_devices(body: Callable[..., None]) -> Callable[..., None]:
    """Lets a body `(rank, world_size, device, ...)` run on the CPU, and on a GPU for each rank."""
    return each_device(by_device(body))


def mostly_on_cuda(name: str, values: Sequence[Any], step: int, ids: Callable[[Any], str]) -> Any:
    """Parametrizes by device and something else, of which the CPU gets every n-th value only."""
    on_cuda = [pytest.param("cuda", value, marks=needs_cuda, id=f"cuda-{ids(value)}") for value in values]
    on_cpu = [pytest.param("cpu", value, id=f"cpu-{ids(value)}") for value in values[::step]]
    return pytest.mark.parametrize(("device", name), [*on_cpu, *on_cuda])


def place_of(device: str, rank: int) -> torch.device:
    """Returns where a rank computes, which is the current device from now on."""
    if device == "cpu":
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(rank)
    return torch.device(device, rank)


def train(model, optimizer, rank, device, steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step).to(device)).backward()
        optimizer.step()


@dataclass(frozen=True)
class Taken:
    """Bytes of a device: most above those before, what stays above them, and all that is reserved then."""

    peak: int
    kept: int
    reserved: int = 0


def memory_of(place: torch.device, action: Callable[[], object]) -> Taken:
    """Measures what an action takes: on a GPU by its caching allocator, on the CPU by the profiler."""
    if place.type == "cpu":
        lap = tensors(action)
        return Taken(lap.peak, lap.kept)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return Taken(peak - before, after - before, torch.cuda.memory_reserved())


def no_waiting(place: torch.device) -> AbstractContextManager[None]:
    """Refuses, with the traceback of the culprit, what makes the host wait for a GPU."""
    return _refusing() if place.type == "cuda" else nullcontext()


@contextmanager
def _refusing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
