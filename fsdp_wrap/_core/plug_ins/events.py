"""Typed events of the runtime, for users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fsdp_wrap._core.plug_ins.kinds import Phase
from fsdp_wrap._core.plug_ins.plug_in import PlugIn, Precedence, everywhere


class EventKind(Enum):
    """Kinds of runtime events.

    Attributes:
        UNSHARD: The all-gather of a unit was issued.
        RESHARD: A unit's full parameters were freed.
        REDUCE: The reduce-scatter of a unit's gradients was issued.
        POST_BACKWARD: A unit's backward is over.
    """

    UNSHARD = "unshard"
    RESHARD = "reshard"
    REDUCE = "reduce"
    POST_BACKWARD = "post_backward"


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
        by_dtype: Of `UNSHARD`, the bytes by the dtype in which they travel, such as "bfloat16". A tensor
            subclass may give tensors of several dtypes, and others in backward than in forward.
    """

    kind: EventKind
    unit: str
    phase: Phase
    nbytes: int = 0
    way: str = ""
    together: tuple[str, ...] = ()
    by_dtype: Mapping[str, int] = field(default_factory=dict, hash=False)


class _Observer(PlugIn):
    """Calls a function with each event."""

    order = Precedence.EVENTS

    def __init__(self, observer: Callable[[Event], None]) -> None:
        self._observer = observer

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        way, by_dtype = unit.buffers.communicator.way, unit.buffers.segments.nbytes_by_dtype()
        self._observer(Event(EventKind.UNSHARD, unit.fqn, phase, nbytes, way, together, by_dtype))

    def sharded(self, unit: Any, phase: Phase, nbytes: int) -> None:
        self._observer(Event(EventKind.RESHARD, unit.fqn, phase, nbytes))

    def reduces(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        way = unit.buffers.communicator.way
        self._observer(Event(EventKind.REDUCE, unit.fqn, phase, nbytes, way, together))

    def backward_over(self, unit: Any, phase: Phase) -> None:
        self._observer(Event(EventKind.POST_BACKWARD, unit.fqn, phase))


def observe_events(observer: Callable[[Event], None]) -> AbstractContextManager[None]:
    """Calls `observer` with every event while the context is open.

    Args:
        observer: The function. It is called at once, in the thread in which the event happens.
    """
    return everywhere.having(_Observer(observer))


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collects the events of this process while the context is open."""
    events: list[Event] = []
    with observe_events(events.append):
        yield events
