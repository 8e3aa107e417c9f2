"""Waits between ranks of one host: numbers in shared memory, and the kernel's futex.

A rank posts by counting up. A waiting rank looks for a moment, lets others run, and then sleeps until it is
woken, for a bounded time, since a rank that has ended wakes nobody.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import time

from fsdp_wrap._comm.shared_memory.mapped_file import Descriptor

_FUTEX = 202  # of x86-64: others do not promise to show writes in their order
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
_LOOKING = 100e-6  # seconds: about the time to wake up
_ASLEEP = 0.05  # seconds until the next look whether a rank has ended


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_system_call = ctypes.CDLL(None)["syscall"]  # our own function object: nobody else changes its types
_system_call.argtypes = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.POINTER(_Time), ctypes.c_void_p, ctypes.c_int),
]


def require_futex() -> None:
    """Raises an OSError where ranks cannot wait for each other in this way."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise OSError(f"not supported on {platform.system()} on {platform.machine()}")


class Life:
    """Tells whether a process runs; raises an OSError if there is none of this id."""

    def __init__(self, process: int) -> None:
        self._descriptor = Descriptor(os.pidfd_open(process))

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()  # a new one: two threads must not ask one at a time
        poll.register(self._descriptor.number, select.POLLIN)
        return bool(poll.poll(0))


def wake(address: int) -> None:
    """Wakes all that wait for the number at an address to change."""
    _system_call(_FUTEX, address, _WAKE, _ALL, None, None, 0)


def wait_until(words: memoryview, address: int, least: int, life: Life, begin: float, limit: float) -> bool:
    """Waits until the first of `words` is at least `least`; returns whether it came so far.

    `begin` is when this rank began to wait, for this and for others, by `time.perf_counter`; `limit` is in
    seconds from then. Raises a RuntimeError if the process that counts has ended.
    """
    while time.perf_counter() - begin < _LOOKING:
        if words[0] >= least:
            return True
        os.sched_yield()
    while (now := words[0]) < least:
        left = limit - (time.perf_counter() - begin)
        if left <= 0:
            return False
        ended = life.ended
        if ended and words[0] < least:  # it may have posted before it ended
            raise RuntimeError("has ended")
        _sleep(address, now, min(left, _ASLEEP))
    return True


def _sleep(address: int, value: int, seconds: float) -> None:
    """Sleeps until woken, if the low half of the number is still the same."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    _system_call(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, limit, None, 0)
