"""`Rows`: the statistics of the running step, and when a step is recorded."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_wrap._values.files import Key, RecordedStep
from fsdp_wrap._values.statistics import Statistics


def check_every(every: object) -> None:
    """Raises a ValueError unless a value is a number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be a positive number of steps")


class Rows:
    """Statistics of the running step; writes them when it has ended.

    Attributes:
        recording: Whether the running pass is recorded.
        stepped: Whether an optimizer has stepped since the last forward began.
        at_end: Adds what is known once a step has ended.
    """

    def __init__(self, write: Callable[[RecordedStep], object], every: int) -> None:
        self._write, self._every = write, every
        self._number = self._passes = 0
        self._rows: dict[Key, Statistics] = {}
        self.recording = self.stepped = False
        self.at_end: Callable[[], None] = lambda: None

    def at(self, seam: str, unit: str) -> Statistics:
        """Returns the statistics of a seam of a unit."""
        return self._rows.setdefault((seam, unit), Statistics())

    def has(self, seam: str, unit: str) -> bool:
        """Whether a seam of a unit has statistics."""
        return (seam, unit) in self._rows

    def begin_pass(self, trains: bool) -> None:
        """Begins an outermost forward; one that does not train is not recorded."""
        if self.stepped:
            self.end_step()
        self.recording = trains and self.due
        self._passes += self.recording

    @property
    def due(self) -> bool:
        """Whether the running step is recorded."""
        return self._number % self._every == 0

    def end_step(self) -> None:
        """Ends a step, and writes it if it was recorded."""
        self.recording = False
        if self._rows:
            self.at_end()
            self._write(RecordedStep(self._number, self._passes, self._rows))
        self._number += self.stepped
        self._rows, self._passes, self.stepped = {}, 0, False
