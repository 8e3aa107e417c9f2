"""`ExecOrder`: the execution order of units, which predicts prefetches and batches."""

from __future__ import annotations

from fsdp_wrap._runtime.unit import Unit

_FAR = 128
"""Number of coming units that are looked at for a batch of collectives."""


class ExecOrder:
    """Records the order of units in the last forward and backward, to predict the next ones.

    The order of starts predicts the next forward, the order of ends the backward. A unit that ran several
    times stands there several times. A wrong guess only costs time, so nothing here needs to be exact.

    Attributes:
        started: Units by the start of their forwards; appended to by callers.
        ended: Units by the end of their forwards; appended to by callers.
        reduced: Units by the reduction of their gradients in the last backward; appended to by callers.
    """

    def __init__(self) -> None:
        self.ended: list[Unit] = []
        self.started: list[Unit] = []
        self.reduced: list[Unit] = []
        self._started_before: list[Unit] = []
        self._reduced_before: dict[Unit, list[Unit]] = {}  # by the first unit
        self._cursor = 0

    def copy(self) -> ExecOrder:
        """Returns a copy, which later records do not change."""
        copy = ExecOrder()
        copy.restore(self)
        return copy

    def restore(self, other: ExecOrder) -> None:
        """Replaces the records by those of another order."""
        self.ended, self.started, self.reduced = [*other.ended], [*other.started], [*other.reduced]
        self._started_before = [*other._started_before]
        self._reduced_before, self._cursor = {**other._reduced_before}, other._cursor

    def begin_forward(self) -> None:
        """Starts a new record."""
        self.ended = []
        self._started_before, self.started = self.started, []

    def next_in_forward(self) -> Unit | None:
        """Returns the unit that followed the last started one in the last iteration."""
        return next(iter(_coming(self.started, self._started_before)), None)

    def begin_backward(self) -> None:
        """Moves the cursor of `next_in_backward` to the end of the forward; starts recording reductions."""
        self._cursor = len(self.ended)
        if self.reduced:
            self._reduced_before[self.reduced[0]] = self.reduced
            self.reduced = []

    def next_in_backward(self, unit: Unit, moves: bool = True) -> Unit | None:
        """Returns the unit whose backward is expected to follow that of `unit`; moves the cursor, or not."""
        for index in range(self._cursor - 1, -1, -1):
            if self.ended[index] is unit:
                self._cursor = index if moves else self._cursor
                return self.ended[index - 1] if index > 0 else None
        return None

    # units expected after a unit: none in the first iteration

    def coming_in_forward(self, unit: Unit) -> list[Unit]:
        """Returns the units that followed `unit` in the last forward, if both ran the same one before."""
        coming = _coming(self.started, self._started_before)
        return coming[1:] if coming and coming[0] is unit else []

    def coming_in_backward(self, unit: Unit) -> list[Unit]:
        """Returns the units whose backwards are expected to follow that of `unit`."""
        for index in range(self._cursor - 1, -1, -1) if self._started_before else ():
            if self.ended[index] is unit:
                return self.ended[max(0, index - _FAR) : index][::-1]
        return []

    def coming_to_reduce(self) -> list[Unit]:
        """Returns the units whose gradients came next last time, if this backward has gone alike so far."""
        return _coming(self.reduced, self._reduced_before.get(self.reduced[0], []))


def _coming(now: list[Unit], before: list[Unit]) -> list[Unit]:
    """Returns the units that came next last time, if this time the last one was the same."""
    place = len(now)
    alike = place <= len(before) and (not place or before[place - 1] is now[-1])
    return before[place : place + _FAR] if alike else []
