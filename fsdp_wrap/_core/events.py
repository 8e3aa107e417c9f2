"""Typed events of the runtime, and their observers. Without observers no event is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    """Kinds of runtime events.

    Attributes:
        UNSHARD: The all-gather of a unit was issued.
        RESHARD: A unit's full parameters were freed.
        STAY: A unit was resharded, but some of its full parameters stay in memory (`keep_unsharded_bytes`).
        REUSE: Full parameters that stayed in memory are used again without a gather.
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
    """Phases of an iteration.

    Attributes:
        index: Position in the order of the phases.
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
    """An event of the runtime.

    Attributes:
        kind: Kind of event.
        unit: Fully qualified name of the unit, "" for the root.
        phase: Phase of the iteration.
        nbytes: Bytes of the buffers on this rank.
        way: Transport, such as "shared memory"; "" for the process group's own collectives.
        together: Names of all units that share the collective, in their order in it, with this unit; empty
            for a collective of this unit alone.
    """

    kind: EventKind
    unit: str
    phase: Phase
    nbytes: int = 0
    way: str = ""
    together: tuple[str, ...] = ()


observers: list[Callable[[Event], None]] = []
"""Active observers."""


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
