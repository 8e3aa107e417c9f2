"""The order in which units run, recorded in forward and read backwards for prefetching."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["ExecOrder"]

UnitT = TypeVar("UnitT")


class ExecOrder(Generic[UnitT]):
    """Order of the last outermost forward, by the end of each unit's forward.

    A unit that ran several times stands in it several times. A wrong guess costs time only, so nothing
    here needs to be exact.
    """

    def __init__(self) -> None:
        self._order: list[UnitT] = []
        self._cursor = 0

    def begin_forward(self) -> None:
        """Starts a new record."""
        self._order = []

    def record(self, unit: UnitT) -> None:
        """Notes that a unit's forward has ended."""
        self._order.append(unit)

    def begin_backward(self) -> None:
        """Sets the place from which `next_in_backward` reads behind the last forward."""
        self._cursor = len(self._order)

    def next_in_backward(self, unit: UnitT) -> UnitT | None:
        """Returns the unit whose backward is expected after that of `unit`."""
        for index in range(self._cursor - 1, -1, -1):
            if self._order[index] is unit:
                self._cursor = index
                return self._order[index - 1] if index > 0 else None
        return None
