"""Typed events of the runtime and the observers that listen to them.

Nothing is built while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    """What the runtime did.

    Attributes:
        UNSHARD: The all-gather of a unit was issued.
        RESHARD: A unit's full parameters were freed.
        STAY: A unit was resharded, and full parameters of it stay in memory (`keep_unsharded_bytes`).
        REUSE: Full parameters that have stayed are used again: they are not gathered.
        REDUCE: The reduce-scatter of a unit's gradients was issued.
        POST_BACKWARD: A unit's backward is over.
    """

    UNSHARD = "unshard"
    RESHARD = "reshard"
    STAY = "stay"
    REUSE = "reuse"
    REDUCE = "reduce"
    POST_BACKWARD = "post_backward"


class Phase(Enum):
    """Where in an iteration something happened.

    Attributes:
        index: Its place among the phases.
    """

    index: int

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINAL_CALLBACK = "final_callback"

    def __init__(self, value: str) -> None:
        self.index = len(type(self).__members__)


@dataclass(frozen=True)
class Event:
    """One thing that the runtime did.

    Attributes:
        kind: What happened.
        unit: Fully qualified name of the unit, "" for the root.
        phase: Where in the iteration it happened.
        nbytes: Bytes of the buffers concerned, on this rank.
        way: How they travel, if not by the process group's own collectives: "shared memory", say.
        together: The names of the units whose buffers travel in one collective, in their order, this one's
            included; none where it travels alone.
    """

    kind: EventKind
    unit: str
    phase: Phase
    nbytes: int = 0
    way: str = ""
    together: tuple[str, ...] = ()


observers: list[Callable[[Event], None]] = []
"""All observers."""


def emit(
    kind: EventKind,
    unit: str,
    phase: Phase,
    nbytes: int = 0,
    way: str = "",
    together: tuple[str, ...] = (),
) -> None:
    """Tells every observer, in the thread in which it happened."""
    if not observers:
        return
    event = Event(kind, unit, phase, nbytes, way, together)
    for observer in tuple(observers):
        observer(event)


@contextmanager
def observe_events(observer: Callable[[Event], None]) -> Iterator[None]:
    """Calls `observer` with every event while the context is open."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collects the events of this process while the context is open.

    Example:
        with record_events() as events:
            model(batch).sum().backward()
        print([(event.kind.value, event.unit) for event in events])
    """
    events: list[Event] = []
    with observe_events(events.append):
        yield events
