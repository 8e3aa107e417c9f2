"""Where communication runs beside computation: streams and events on an accelerator, works on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fsdp_wrap._comm.device import Accelerator, accelerator_of


class Pending(Protocol):
    """Something issued that may still be running."""

    def wait(self) -> None:
        """Makes what the caller does next come after it: on the host, or on the current stream."""


class Finished:
    """A `Pending` with nothing left to wait for."""

    def wait(self) -> None:
        return None


class Then:
    """Waits for some things, and then does others."""

    def __init__(self, works: Sequence[Pending], actions: Sequence[Callable[[], None]] = ()) -> None:
        self._works, self._actions = works, actions

    def wait(self) -> None:
        for each in self._works:
            each.wait()
        for action in self._actions:
            action()


class Lane:
    """One queue of communication that runs beside the computation: on the CPU, the process group's own."""

    def issue(self, start: Callable[[bool], Sequence[Any] | None]) -> Pending:
        """Runs `start` after all that the computation has issued so far.

        Args:
            start: Issues copies and collectives; gets whether to ask the process group for
                asynchronous works, and returns those.
        """
        works = start(True)
        return Then(works) if works else Finished()

    def finish(self) -> None:
        """Lets the host wait until nothing that was issued reads its memory any more."""
        return None


class _EventPending:
    """What runs on a lane's stream until an event.

    Args:
        event: It.
        accelerator: Whose current stream waits.
        start: What was issued. It holds the buffers concerned.
    """

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
    """An accelerator's: a stream of our own.

    Collectives are asked for synchronously with our stream current, so the process group neither adds a
    stream nor keeps buffers alive; whoever allocated the buffers does so on the compute stream and frees
    them there after `wait`, so no `record_stream` is needed.
    """

    def __init__(self, accelerator: Accelerator, purpose: str) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream(purpose)

    def issue(self, start: Callable[[bool], Sequence[Any] | None]) -> Pending:
        current = self._accelerator.current_stream()
        self._stream.wait_stream(current)
        try:
            with self._stream:
                start(False)
                event = self._stream.record_event()
        except BaseException:
            current.wait_stream(self._stream)  # a part of it may run
            raise
        return _EventPending(event, self._accelerator, start)

    def finish(self) -> None:
        self._stream.synchronize()


_ON_CPU = Lane()


def lane_of(device: torch.device, purpose: str) -> Lane:
    """Returns the one lane of this process for a device and a purpose, such as "gather"."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return _ON_CPU
    lane: Lane | None = accelerator.lanes.get(purpose)
    if lane is None:
        lane = accelerator.lanes[purpose] = StreamLane(accelerator, purpose)
    return lane
