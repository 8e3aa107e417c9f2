"""Where communication runs beside computation: streams and events on an accelerator, works on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch

__all__ = ["Finished", "Issued", "Lane", "Pending", "Then", "WorksPending", "lane_of"]


class Pending(Protocol):
    """Something issued that may still be running."""

    def wait(self) -> None:
        """Makes what the caller does next come after it: on the host, or on the current stream."""


class Issued(Pending, Protocol):
    """What a lane returns."""

    def wait_for(self, limit: timedelta) -> bool:
        """As `wait`, but gives up after some time; returns whether that was enough."""


class Lane(ABC):
    """One queue of communication that runs beside the computation."""

    @abstractmethod
    def issue(self, start: Callable[[bool], Sequence[Any] | None]) -> Issued:
        """Runs `start` after all that the computation has issued so far.

        Args:
            start: Issues copies and collectives; gets whether to ask the process group for
                asynchronous works, and returns those.
        """


class Finished:
    """A `Pending` with nothing left to wait for."""

    def wait(self) -> None:
        return None

    def wait_for(self, limit: timedelta) -> bool:
        return True


class WorksPending:
    """Several works, waited for one after the other."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def wait_for(self, limit: timedelta) -> bool:
        for work in self._works:
            if not _wait_for(work, limit):
                return False
        return True


def _wait_for(work: Any, limit: timedelta) -> bool:
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():  # it goes on: only the waiting has ended
            return False
        work.wait()  # tells what ended it: perhaps success, just after the waiting
    return True


class Then:
    """Waits for some things, and then does others."""

    def __init__(self, works: list[Pending], actions: Sequence[Callable[[], None]] = ()) -> None:
        self._works, self._actions = works, actions

    def wait(self) -> None:
        for each in self._works:
            each.wait()
        for action in self._actions:
            action()


class HostLane(Lane):
    """The CPU's: works of the process group take the place of streams."""

    def issue(self, start: Callable[[bool], Sequence[Any] | None]) -> Issued:
        works = start(True)
        return WorksPending(works) if works else Finished()


class _EventPending:
    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def wait_for(self, limit: timedelta) -> bool:
        self.wait()  # the host does not block
        return True


class StreamLane(Lane):
    """An accelerator's: a stream of our own.

    Collectives are asked for synchronously with our stream current, so the process group neither adds a
    stream nor keeps buffers alive; whoever allocated the buffers does so on the compute stream and frees
    them there after `wait`, so no `record_stream` is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def issue(self, start: Callable[[bool], Sequence[Any] | None]) -> Issued:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            start(False)
            event = self._stream.record_event()
        return _EventPending(event, self._device)


@lru_cache
def lane_of(device: torch.device, purpose: str) -> Lane:
    """Returns the one lane of this process for a device and a purpose, such as "gather"."""
    return HostLane() if device.type == "cpu" else StreamLane(device)
