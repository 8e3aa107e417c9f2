"""Meters: bytes of tensors, of a process, of a host, that sockets received; collectives and their bytes."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_MMAP_THRESHOLD = -3  # as in malloc.h
_BYTES_RECEIVED = 128  # where struct tcp_info of Linux has them


@dataclass(frozen=True)
class Lap:
    """Bytes beyond those before an action: at most while it ran, and those that it left behind."""

    peak: int
    kept: int


def tensors(action: Callable[[], object]) -> Lap:
    """Measures the tensors that this thread made: exact, but blind to other threads and to other memory.

    On a CPU backward runs in the calling thread. Collectives allocate little elsewhere, and `resident` sees
    that.
    """
    gc.collect()  # what others left is not freed meanwhile
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda event: event.start_ns())
    running = list(accumulate((event.nbytes() for event in memory), initial=0))
    return Lap(max(running), running[-1])


def resident(action: Callable[[], object]) -> Lap:
    """Measures the whole process in the kernel's account: all threads, and memory of any kind. Linux only.

    From the first call on, the C library gets allocations of more than a page or two from the system, and
    gives them back when they are freed. So resident pages are pages in use, to a few hundred kilobytes.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 14)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # lets the high-water mark begin anew
    status = "/proc/self/status"
    before = _told(status, "VmRSS")
    action()
    return Lap(_told(status, "VmHWM") - before, _told(status, "VmRSS") - before)


def resident_on_host(action: Callable[[], object], watched: bool = True) -> Lap:
    """Measures all ranks together, shared pages counted once; called on every rank of one host.

    The peak is the most that was seen in looks about every 10 ms, which only the first rank takes; the others
    return zeros. Linux only.

    Args:
        action: The action to measure.
        watched: Whether to look while it runs, which slows it down, or only before and after.
    """
    processes = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    gc.collect()
    dist.barrier()
    with Looks(processes if dist.get_rank() == 0 else (), watched) as looks:
        dist.barrier()
        action()
        gc.collect()
        dist.barrier()
    dist.barrier()
    return Lap(max(looks.seen) - looks.seen[0], looks.seen[-1] - looks.seen[0])


class Looks:
    """Looks at the memory of some processes: at the beginning and the end, and all the time in between."""

    def __init__(self, processes: Collection[int], watched: bool) -> None:
        self.seen: list[int] = []
        self._processes = processes
        self._watches = watched and bool(processes)
        self._over = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Looks:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while self._watches and not self._over.wait(0.01):
            self._look()

    def _look(self) -> None:
        files = (f"/proc/{process}/smaps_rollup" for process in self._processes)
        # Pages of files are left out: their shares change as any other process maps the same libraries.
        self.seen.append(sum(_told(file, "Pss_Anon") + _told(file, "Pss_Shmem") for file in files))


def received() -> int:
    """Counts the bytes that this process has received over its open TCP connections. Linux only."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor, and what is no TCP connection
            total += _received_by(int(descriptor))
    return total


def _received_by(descriptor: int) -> int:
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        return 0
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])


def _told(file: str, key: str) -> int:
    """Reads a number of bytes from a file of the kernel."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    assert match, f"this system does not tell {key}"
    return 1024 * int(match[1])


_KINDS = {
    "gathers": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce-scatters": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all-reduces": ("allreduce_", "all_reduce", "all_reduce_"),
    "all-to-alls": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "messages": ("send", "recv_"),
}
"""Names of operators by kind; all others are of the kind "others"."""

_SEND_NOTHING = ("wait_tensor", "check_for_nan", "_wrap_tensor_autograd")


class OutsideGroups:
    """A clock of seconds that are not spent within gathers and reductions of process groups.

    A group that sends nothing still copies a shard once for each rank, which no real group's host does.
    """

    _METHODS = ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single")

    def __init__(self) -> None:
        self._within = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._within

    @contextmanager
    def running(self) -> Iterator[Callable[[], float]]:
        """Lets all groups' methods stop the clock."""
        with ExitStack() as patches:
            for name in self._METHODS:
                if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                    patches.enter_context(patch.object(dist.ProcessGroup, name, self._stopped(method)))
            yield self.now

    def _stopped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._within += time.perf_counter() - since

        return stopped


class Travelling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives that are issued, and the bytes of what they gather, reduce or send, by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SEND_NOTHING:
            kind = next((kind for kind, names in _KINDS.items() if name in names), "others")
            self.calls[kind] += 1
            self.nbytes[kind] += max(map(_nbytes, (*args, result)))
        return result


def _nbytes(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return arg.nbytes
    return sum(map(_nbytes, arg)) if isinstance(arg, (list, tuple)) else 0
