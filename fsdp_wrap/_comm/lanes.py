"""Communication and copies that run beside the computation: on streams, or as works on the CPU.

Copies to the device take the lane "to device", copies to the host the lane "to host": neither queues behind
collectives. Memory of the device is allocated and freed on the stream of the computation, which has waited
for the copies by then.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

import torch

from fsdp_wrap._comm.device import Accelerator, accelerator_of
from fsdp_wrap._comm.watching.monitor import monitor_of
from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._core import everywhere


class Pending(Protocol):
    """Handle of an asynchronous operation."""

    def wait(self) -> None:
        """Makes the caller's next work come after it: on the host, or on the current stream."""


class Finished:
    """A `Pending` with nothing left to wait for."""

    def wait(self) -> None:
        return None


class Then:
    """Waits for some works, and then runs some actions."""

    def __init__(self, works: Sequence[Pending], actions: Sequence[Callable[[], None]] = ()) -> None:
        self._works, self._actions = works, actions

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for action in self._actions:
            action()


class Lane:
    """One queue of communication beside the computation: on the CPU, the process group's own."""

    def issue(self, start: Callable[[bool], Sequence[Any] | None], watch: Watch | None = None) -> Pending:
        """Runs `start` after all that the computation has issued so far.

        `start` issues copies and collectives; it gets whether to ask the process group for asynchronous
        works, and returns those. `watch` looks after them where the host does not wait; None if nothing is
        sent.
        """
        works = start(True)
        return Then(works) if works else Finished()


class _EventPending:
    """Work on a lane's stream up to an event; it holds `start`, and so the buffers concerned."""

    def __init__(
        self, event: torch.Event, accelerator: Accelerator, start: Callable[[bool], Sequence[Any] | None]
    ) -> None:
        self._event, self._accelerator = event, accelerator
        self._start: Callable[[bool], Sequence[Any] | None] | None = start

    def wait(self) -> None:
        self._accelerator.current_stream().wait_event(self._event)
        self._start = None

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nobody has waited: the memory of the buffers must not be reused before. When the interpreter ends,
        # it is not reused, and names of modules may be gone.
        if self._start is not None and not ends():
            self.wait()


class StreamLane(Lane):
    """A stream beside an accelerator's current one.

    Collectives are asked for synchronously with our stream current, so the process group neither adds a
    stream nor keeps buffers alive. Buffers are allocated on the compute stream and freed there after `wait`,
    so no `record_stream` is needed.
    """

    def __init__(self, accelerator: Accelerator, purpose: str) -> None:
        self._accelerator, self._purpose = accelerator, purpose
        self._stream = accelerator.new_stream(purpose)
        self._monitor = monitor_of(accelerator)

    def issue(self, start: Callable[[bool], Sequence[Any] | None], watch: Watch | None = None) -> Pending:
        current = self._accelerator.current_stream()
        self._stream.wait_stream(current)
        try:
            with self._stream:
                watched = bool(everywhere.on_lane) and not self._accelerator.captures
                begin = self._accelerator.record_time() if watched else None
                start(False)
                event = self._stream.record_event()
                if begin is not None:
                    self._tell(begin)
        except BaseException:
            current.wait_stream(self._stream)  # a part of it may run
            raise
        if watch is not None and not self._accelerator.captures:
            self._monitor.note(event, self._purpose, watch)
        return _EventPending(event, self._accelerator, start)

    def _tell(self, begin: Any) -> None:
        """Tells plug-ins the time since an event."""
        end = self._accelerator.record_time()
        for act in everywhere.on_lane:
            act(self._purpose, begin, end)

    def follow(self, other: StreamLane) -> None:
        """Orders later work of this lane, and `finish`, after the work of another lane."""
        self._stream.wait_stream(other._stream)

    def finish(self) -> None:
        """Lets the host wait for all that was issued."""
        self._stream.synchronize()


class HostLane:
    """One queue of host work in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fsdp_wrap host lane")
        self._issued: deque[Future[None]] = deque()

    def issue(self, work: Callable[[], None]) -> None:
        """Queues some work."""
        self._issued.append(self._thread.submit(work))

    def finish(self) -> None:
        """Waits for all that was issued, and raises the first error."""
        issued, self._issued = self._issued, deque()
        for error in [future.exception() for future in issued]:  # which waits for all
            if error is not None:
                raise error

    def settle(self) -> None:
        """Waits for all that was issued; `finish` or `abandon` is still to come."""
        wait([*self._issued])

    def abandon(self) -> None:
        """Waits for all that was issued, and ignores errors."""
        self.settle()
        self._issued.clear()


_ON_CPU = Lane()


def lane_of(device: torch.device, purpose: str) -> Lane:
    """Returns this process's lane for a device and a purpose, such as "gather"."""
    accelerator = accelerator_of(device)
    return _ON_CPU if accelerator is None else lane_on(accelerator, purpose)


def lane_on(accelerator: Accelerator, purpose: str) -> StreamLane:
    """Returns this process's lane for an accelerator and a purpose."""
    lane: StreamLane | None = accelerator.lanes.get(purpose)
    if lane is None:
        lane = accelerator.lanes[purpose] = StreamLane(accelerator, purpose)
    return lane


def host_lane_of(device: torch.device) -> HostLane:
    """Returns a new lane for host work beside a device, which may be the CPU."""
    accelerator = accelerator_of(device)
    lane: HostLane = HostLane() if accelerator is None else accelerator.new_host_lane(HostLane)
    return lane


# copies between host and device

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Returns an uninitialised 1-D tensor in host memory."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

_TO_DEVICE, _TO_HOST, _GATHER = "to device", "to host", "gather"


class FromHost:
    """A 1-D tensor in host memory whose values go to the device again and again, in a dtype of their own.

    Another dtype than the tensor's is made on the host, in memory from `allocate`, once for all copies until
    `outdate`. Otherwise nothing could be copied without the host.
    """

    def __init__(
        self, accelerator: Accelerator, values: torch.Tensor, dtype: torch.dtype, allocate: Allocate
    ) -> None:
        self._accelerator, self._values, self._dtype, self._allocate = accelerator, values, dtype, allocate
        self.lends = values.dtype == dtype  # then `values` must not be written to before copies are done
        self.nbytes = values.numel() * dtype.itemsize
        self._cast: torch.Tensor | None = None
        self._ahead: tuple[torch.Tensor, Pending] | None = None
        self._used: torch.Tensor | None = None

    def outdate(self) -> None:
        """Drops the cast of the values, which may have changed."""
        # Copies may still read that: so the next cast takes memory of its own. The allocator knows.
        self._cast = None
        self.recall()

    def recall(self) -> None:
        """Frees the device memory of a `send_ahead` that no `write` has used."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].wait()

    def send_ahead(self, empty: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Begins to copy the values to device memory from `empty`, for the next `write`."""
        if self._ahead is not None:
            return
        there, values = empty(self._values.numel(), self._dtype), self._to_send()
        self._ahead = there, copy_to_device(self._accelerator, [(there, values)])

    def write(self, out: torch.Tensor) -> None:
        """Copies the values to a tensor on the device, on the current stream.

        `settle` must follow, once the stream of the computation has waited for that.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            out.copy_(self._to_send(), non_blocking=True)
        else:
            self._used, arriving = ahead
            arriving.wait()
            out.copy_(self._used)

    def settle(self) -> None:
        """Frees device memory that `write` has read."""
        self._used = None

    def _to_send(self) -> torch.Tensor:
        if self.lends:
            return self._values
        if self._cast is None:
            self._cast = self._allocate(self._values.numel(), self._dtype).copy_(self._values)
        return self._cast


class ToHost:
    """A copy of a 1-D device tensor to host memory; the host may read `values` after `await_arrivals`."""

    def __init__(self, accelerator: Accelerator, tensor: torch.Tensor, allocate: Allocate) -> None:
        self.values = allocate(tensor.numel(), tensor.dtype)
        self._copying = copy_to_host(accelerator, [(self.values, tensor)])

    def release(self) -> None:
        """Frees the device tensor, for which the computation waits for the copy."""
        self._copying.wait()


def copy_to_device(accelerator: Accelerator, pairs: Pairs, purpose: str = _TO_DEVICE) -> Pending:
    """Issues copies (target, source) from host memory, beside the computation."""
    return lane_on(accelerator, purpose).issue(partial(_copy, pairs))


def copy_to_host(accelerator: Accelerator, pairs: Pairs, purpose: str = _TO_HOST) -> Pending:
    """Issues copies (target, source) to host memory; `await_arrivals` waits for those of this purpose."""
    return lane_on(accelerator, purpose).issue(partial(_copy, pairs))


def _copy(pairs: Pairs, _: bool) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def await_arrivals(accelerator: Accelerator) -> None:
    """Lets the host wait for all copies to it."""
    lane_on(accelerator, _TO_HOST).finish()


def await_copies(accelerator: Accelerator) -> None:
    """Lets the host wait, once, for all copies from and to its memory."""
    last: StreamLane = lane_on(accelerator, _TO_HOST)
    for purpose in (_TO_DEVICE, _GATHER):
        last.follow(lane_on(accelerator, purpose))
    last.finish()
