"""`Arrivals`: which leaves of a unit have their gradient in the running backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

__all__ = ["Arrivals"]


class Arrivals:
    """Which of a unit's leaves still lack their gradient in the running backward.

    The leaves' hooks note each gradient here, and let the schedule look where it may have to do something:
    after the first, unless it has looked before, at a quarter of the bytes, and after the last, unless more
    than leaves are awaited. It holds no leaf, since leaves hold it.

    Attributes:
        missing: A weight for each leaf without its gradient, by id.
        crowded: Whether a quarter had come when the schedule looked last.
    """

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        self._total = self._to_come = self._quarter_came = self._next_look = 0
        self.crowded = False

    def expect(self, leaves: Iterable[nn.Parameter]) -> None:
        """Expects the gradients of these leaves in each backward that follows."""
        self._weights = {id(leaf): 1 + leaf.nbytes for leaf in leaves}
        self._total = sum(self._weights.values())
        self._quarter_came = self._total * 3 // 4

    def begin(self) -> None:
        """Expects all gradients anew."""
        self.missing = self._weights.copy()
        self._to_come = self._next_look = self._total
        self.crowded = False

    def hook(
        self, leaf: nn.Parameter, look: Callable[[nn.Parameter], None]
    ) -> Callable[[nn.Parameter], None]:
        """Returns a leaf's hook, which notes its gradient and calls `look` where the schedule is to look."""
        key = id(leaf)

        def note(leaf: nn.Parameter) -> None:
            if not self.missing:  # the first of a backward, or reached again by another graph task
                self.begin()
            self._to_come -= self.missing.pop(key, 0)
            if self._to_come <= self._next_look:
                look(leaf)

        return note

    def begin_with(self, leaf: nn.Parameter) -> None:
        """Expects all gradients anew but that of a leaf which has come already."""
        self.begin()
        self._to_come -= self.missing.pop(id(leaf), 0)

    def look(self, every: bool, last: bool) -> bool:
        """Decides after which gradient to look next; returns whether all have come.

        Args:
            every: Whether to look after each that follows.
            last: Whether to look after the last.
        """
        self.crowded = self._to_come <= self._quarter_came
        after_quarter = 0 if last else -1
        self._next_look = (
            self._to_come if every else after_quarter if self.crowded else self._quarter_came
        )
        return not self.missing

    def end(self) -> None:
        """Lets the schedule look after the next gradient, which is another backward's."""
        self.missing = {}
