"""Measures the machine that a program runs on, for predictions of time."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Communicator, all_gather_object, host_id, make_communicator, neighbours, ranks_in
from fsdp_wrap.tools.planning import Machine

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FIRST_WIDTH, _LAST_WIDTH = 128, 8192  # of matrices; the largest is the first that takes long enough
_LONG_ENOUGH = 0.02  # seconds of one multiplication
_COPIED = {"cpu": 1 << 26}  # bytes of a copy, far beyond caches
_COPIED_BY_DEVICES = 1 << 29
_SMALL_OPERATORS = 200
_LARGE, _SMALL = 1 << 24, 1 << 10  # bytes of gathered tensors
_ETHERNET = 1.25e9  # bytes a second of 10 Gb/s, for what a process alone cannot measure


@dataclass(frozen=True)
class Link:
    """The speed of a group's collectives.

    Attributes:
        bandwidth: Bytes a second that a rank receives in large gathers and reductions.
        latency: Seconds that a small gather takes.
        overlap: The part of a large gather's time in which the device computes at full speed.
    """

    bandwidth: float
    latency: float
    overlap: float = 1.0


def measure_machine(device: str | torch.device | None = None, *, seconds: float = 0.2) -> Machine:
    """Measures the machine that this process runs on, in a few seconds; collective in a process group.

    Matrices of each dtype are multiplied, and memory is copied. Where `torch.distributed` is initialised, all
    ranks call this and measure at the same time, so that each has its share of a host. Gathers and sums are
    then timed within hosts and between them, by the communicators of this library. A process alone cannot
    measure links: those within the host are assumed to be as fast as copies of its memory, those between
    hosts 10 Gb/s, and `source` says so. Values are medians; float32 on CUDA follows
    `torch.backends.cuda.matmul.allow_tf32`.

    Args:
        device: The device that computes; None for the accelerator if there is one, else the CPU.
        seconds: The longest time to repeat each measurement; each is made three times at least.

    Returns:
        The machine, all figures per rank.

    Raises:
        ValueError: If there is no such device, or `seconds` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, not {seconds}")
    place = _device(device)
    timer = _DeviceTimer(place, seconds)
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None:
        dist.barrier(group)
    flops = {str(dtype).removeprefix("torch."): value for dtype in _DTYPES if (value := timer.flops(dtype))}
    memory = timer.memory_bandwidth()
    within, between, per_host, source = _links(group, place, memory, seconds)
    return Machine(
        name=_name_of(place),
        flops=flops,
        memory_bandwidth=memory,
        bandwidth_within=within.bandwidth,
        bandwidth_between=between.bandwidth,
        latency_within=within.latency,
        latency_between=between.latency,
        ranks_per_host=per_host,
        host_bandwidth=timer.host_bandwidth(memory),
        operator_seconds=timer.operator_seconds(),
        overlap=between.overlap,
        device_memory=_memory_of(place, per_host),
        source=f"measured by measure_machine(); {source}",
    )


def measure_link(communicator: Communicator, seconds: float = 0.2) -> Link:
    """Measures gathers and sums of a communicator; collective.

    Args:
        communicator: It must have two ranks or more.
        seconds: The longest time to repeat each of them.
    """
    timer = _DeviceTimer(communicator.device, seconds)
    received = (communicator.size - 1) / communicator.size

    def gathering(nbytes: int) -> Callable[..., None]:
        numel = nbytes // 4 // communicator.size * communicator.size
        full = communicator.buffer(numel, torch.float32)
        own = torch.ones(numel // communicator.size, device=communicator.device)

        def fill() -> None:
            communicator.own_part(full.data).copy_(own)

        def once(beside: Callable[[], object] = lambda: None) -> None:
            full.free()
            pending = communicator.gather_into([full], fill)
            beside()
            pending.wait()

        return once

    def reduce(nbytes: int) -> float:
        shard = communicator.empty(nbytes // 4 // communicator.size, torch.float32)
        full = communicator.empty(shard.numel() * communicator.size, torch.float32).zero_()
        return _agreed(communicator, timer, lambda: communicator.reduce_scatter([shard], [full]).wait())

    agreed, gather = partial(_agreed, communicator, timer), gathering(_LARGE)
    small, alone = agreed(gathering(_SMALL * communicator.size)), agreed(gather)
    large, compute = alone + reduce(_LARGE), timer.computing(alone)
    computing, together = agreed(compute), agreed(partial(gather, compute))
    overlap = (alone + computing - together) / min(alone, computing)
    bandwidth = 2 * _LARGE * received / max(large - 2 * small, large / 10)
    return Link(bandwidth, small, min(max(overlap, 0.0), 1.0))


def _agreed(communicator: Communicator, timer: _DeviceTimer, once: Callable[[], object]) -> float:
    """Returns the seconds of a collective, repeated equally often on all ranks."""
    once()
    first = max(communicator.all_gather_object(timer.timed(once)))
    times = max(3, min(50, int(timer.seconds / max(first, 1e-9))))
    median = statistics.median(timer.timed(once) for _ in range(times))
    return float(max(communicator.all_gather_object(median)))


def _links(
    group: dist.ProcessGroup | None, device: torch.device, memory: float, seconds: float
) -> tuple[Link, Link, int, str]:
    """Returns the links within hosts and between them, ranks per host, and where the figures come from."""
    copies, ethernet = Link(memory / 2, 1e-5), Link(_ETHERNET, 5e-5)
    if group is None or dist.get_world_size(group) == 1:
        count = torch.accelerator.device_count() if device.type != "cpu" else 1
        return copies, ethernet, max(1, count), "a process alone: links assumed"
    ranks = ranks_in(group)
    hosts = all_gather_object(host_id(), group)
    whole = measure_link(make_communicator(ranks, device), seconds)
    local = Counter(hosts).most_common(1)[0][1]
    if local == ranks.size:
        return whole, whole, local, f"{local} ranks of one host: links between hosts taken to be as within"
    if local == 1:
        return copies, whole, 1, f"{ranks.size} hosts"
    if set(Counter(hosts).values()) != {local} or any(
        len(set(hosts[first : first + local])) > 1 for first in range(0, ranks.size, local)
    ):
        return whole, whole, local, f"{ranks.size} ranks that lie unevenly on hosts: links taken to be alike"
    within = measure_link(make_communicator(neighbours(ranks, local), device), seconds)
    return within, whole, local, f"{ranks.size // local} hosts with {local} ranks each"


class _DeviceTimer:
    """Times work of a device, each for `seconds` at most."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self.seconds = seconds

    def timed(self, do: Callable[[], object]) -> float:
        """Returns the seconds until the device has done some work."""
        self._finish()
        begin = time.perf_counter()
        do()
        self._finish()
        return time.perf_counter() - begin

    def flops(self, dtype: torch.dtype) -> float | None:
        """Returns the FLOP/s of multiplying matrices; None for a dtype that the device does not multiply."""
        width, taken = _FIRST_WIDTH, 0.0
        while True:
            try:
                left = torch.ones(width, width, dtype=dtype, device=self._device)
                product = torch.empty_like(left)
                torch.mm(left, left, out=product)
            except (RuntimeError, NotImplementedError):  # out of memory, or no such operator
                return None if not taken else 2 * (width // 2) ** 3 / taken
            multiply = partial(torch.mm, left, left, out=product)
            taken = self.timed(multiply)
            if taken >= _LONG_ENOUGH or width == _LAST_WIDTH:
                return 2 * width**3 / self._median(multiply)
            width *= 2

    def computing(self, seconds: float) -> Callable[[], object]:
        """Returns a computation that takes about so many seconds."""
        left = torch.ones(_FIRST_WIDTH, _FIRST_WIDTH, device=self._device)
        multiply = partial(torch.mm, left, left, out=torch.empty_like(left))
        times = max(1, int(seconds / self._median(multiply)))
        return lambda: [multiply() for _ in range(times)]

    def memory_bandwidth(self) -> float:
        """Returns the bytes a second that a copy reads and writes."""
        nbytes = _COPIED.get(self._device.type, _COPIED_BY_DEVICES)
        source = torch.ones(nbytes // 4, device=self._device)
        target = torch.zeros_like(source)
        return 2 * nbytes / self._median(lambda: target.copy_(source))

    def host_bandwidth(self, memory: float) -> float:
        """Returns the bytes a second between device and host; for the CPU those of a copy."""
        if self._device.type == "cpu":
            return memory / 2
        nbytes = _COPIED["cpu"]
        there = torch.ones(nbytes // 4, device=self._device)
        here = torch.empty(nbytes // 4, pin_memory=True)
        return nbytes / self._median(lambda: here.copy_(there, non_blocking=True))

    def operator_seconds(self) -> float:
        """Returns the seconds of a small operator."""
        few = torch.zeros(8, device=self._device)

        def many() -> None:
            for _ in range(_SMALL_OPERATORS):
                few.add_(1)

        return self._median(many) / _SMALL_OPERATORS

    def _median(self, do: Callable[[], object]) -> float:
        do()
        times: list[float] = []
        while len(times) < 3 or (sum(times) < self.seconds and len(times) < 100):
            times.append(self.timed(do))
        return statistics.median(times)

    def _finish(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        current = torch.accelerator.current_accelerator(check_available=True)
        return current if current is not None else torch.device("cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={str(device)!r} cannot be measured here: {reason}") from error
    if place.type == "meta":
        raise ValueError("device='meta' computes nothing: name one that does")
    return place


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        return f"{platform.node()} ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"
    return device.type


def _memory_of(device: torch.device, per_host: int) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_host
