"""Typed events of the runtime, and values that it passes on, with their observers. Free without observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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
def appended(items: list[T], item: T) -> Iterator[None]:
    """Keeps an item in a list, as of active observers, while the context is open."""
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)


def observe_events(observer: Callable[[Event], None]) -> AbstractContextManager[None]:
    """Calls `observer` with every event while the context is open.

    Args:
        observer: The function. It is called at once, in the thread in which the event happens.
    """
    return appended(observers, observer)


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collects the events of this process while the context is open."""
    events: list[Event] = []
    with observe_events(events.append):
        yield events


class ValueSeam(Enum):
    """The seams of a step, with the names that they have in messages.

    Attributes:
        PARAMETERS: A unit's full parameters are shown, for a forward or a backward.
        INPUTS: A unit begins to compute with these tensors.
        OUTPUTS: A unit's forward has computed these tensors.
        OUTPUT_GRADIENTS: A gradient has reached an output of a unit.
        INPUT_GRADIENTS: The gradient of an input of a unit is done.
        GRADIENTS: This rank's gradients of a unit are about to leave the leaves.
        REDUCED: A gradient shard is summed and divided; the owner is its layout.
    """

    PARAMETERS = "parameter"
    INPUTS = "input"
    OUTPUTS = "output"
    OUTPUT_GRADIENTS = "gradient of output"
    INPUT_GRADIENTS = "gradient of input"
    GRADIENTS = "gradient"
    REDUCED = "reduced gradient"


class ValueWatcher:
    """Sees the values of steps, in the thread in which they happen; a base that ignores all of them."""

    def begin(self, schedule: Any) -> None:
        """Notes that an outermost forward begins, or one of others that this rank takes part in.

        May communicate where all ranks run the forward, and may raise.
        """

    def see(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        """Looks at values, which must stay as they are.

        Args:
            owner: The unit, or the layout.
            seam: Place in the step.
            values: None of `PARAMETERS` and `GRADIENTS`, which the leaves of the unit hold.
        """

    def compute(self, unit: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Notes that a unit is about to compute: `compute(*args, **kwargs)`, with its leaves shown."""

    def send(self, layout: Any, full: torch.Tensor) -> None:
        """Notes that a reduce buffer is complete, as it will be sent."""

    def end(self, schedule: Any) -> None:
        """Notes that a backward has ended; may communicate where all ranks run it, and may raise."""


value_watchers: list[ValueWatcher] = []
"""Active watchers."""


def tell_values(owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None] = ()) -> None:
    """Shows values to every watcher."""
    for watcher in tuple(value_watchers):
        watcher.see(owner, seam, values)
