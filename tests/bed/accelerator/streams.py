"""Streams and events that exist in name only: what they order, as vector clocks.

A clock tells of each queue how many of its actions come before. The queues are the streams and the host.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

Clock = dict[str, int]


class Arrivals(Protocol):
    """A collective that completes when all ranks have come."""

    done: bool


HOST = "host"


def join(clock: Clock, other: Clock) -> None:
    """Lets what follows `clock` follow `other` as well."""
    for queue, ticks in other.items():
        if ticks > clock.get(queue, 0):
            clock[queue] = ticks


HostWaits = Callable[[Clock, str], None]
"""Called with a clock that the host waits for, and by what."""


class Stream:
    """A queue of the device, with the methods of `torch.Stream` that anybody uses.

    Args:
        name: For messages; no two streams have the same.
        current: The stack of those that are current.
    """

    def __init__(self, name: str, current: list[Stream], host_waits: HostWaits) -> None:
        self.name, self.clock = name, Clock()
        self._current, self._host_waits = current, host_waits
        self.behind: list[Arrivals] = []

    def __enter__(self) -> Stream:
        self._current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._current.pop()

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)
        self.follow(*other.behind)

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)
        self.follow(*event.behind)

    def follow(self, *collectives: Arrivals) -> None:
        """Lets what follows complete only after some collectives, whose ranks the host has not waited for."""
        self.behind = [work for work in dict.fromkeys([*self.behind, *collectives]) if not work.done]

    def record_event(self) -> Event:
        event = Event(dict(self.clock), self._current, self._host_waits)
        event.behind = list(self.behind)
        return event

    def synchronize(self) -> None:
        self._host_waits(self.clock, "Stream.synchronize")


class Event:
    """A point in a stream, with the methods of `torch.Event` that anybody uses."""

    def __init__(self, clock: Clock, current: list[Stream], host_waits: HostWaits) -> None:
        self.clock, self._current, self._host_waits = clock, current, host_waits
        self.behind: list[Arrivals] = []
        self.at = perf_counter()  # operators run at once, so it has happened when it is recorded

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)

    def query(self) -> bool:
        return all(work.done for work in self.behind)

    def wait(self) -> None:
        self._current[-1].wait_event(self)

    def synchronize(self) -> None:
        self._host_waits(self.clock, "Event.synchronize")
