"""`Arrivals`: what a unit has got of the running backward, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from torch import nn


class Progress(Enum):
    """How far a unit's part of the running backward of its tree is."""

    UNREACHED = "unreached"
    RUNNING = "running"
    FINISHED = "finished"


class Arrivals:
    """What one unit has got of the running backward of its tree, and what it waits for.

    The leaves' hooks note each gradient here, and let the schedule act where it may have to do something:
    after the first, unless it has acted before, at a quarter of the bytes, and after the last, unless more
    than leaves are awaited. It holds no leaf, since leaves hold it.

    Attributes:
        progress: How far the unit's part is.
        missing: A weight for each leaf without its gradient, by id.
        quarter_came: Whether a quarter had come when the schedule acted last.
        open_calls: How many forward calls wait for gradients of their watched inputs.
        needed_to_end: Whether the leaves may be needed until the running backward of the tree ends.
    """

    def __init__(self) -> None:
        self.progress = Progress.UNREACHED
        self.missing: dict[int, int] = {}
        self.quarter_came = False
        self.open_calls = 0
        self.needed_to_end = False
        self._weights: dict[int, int] = {}
        self._total = self._to_come = self._quarter = self._next_stop = 0

    def expect(self, leaves: Iterable[nn.Parameter]) -> None:
        """Expects the gradients of these leaves in each backward that follows."""
        self._weights = {id(leaf): 1 + leaf.nbytes for leaf in leaves}
        self._total = sum(self._weights.values())
        self._quarter = self._total * 3 // 4

    def begin(self) -> None:
        """Prepares for a backward of the tree, which may or may not reach the unit."""
        self.progress = Progress.UNREACHED
        self.open_calls = 0
        self.needed_to_end = self.quarter_came = False
        self.missing = self._weights.copy()  # as `expect_all`, in a frame less
        self._to_come = self._next_stop = self._total

    def expect_all(self) -> None:
        """Expects all gradients anew."""
        self.missing = self._weights.copy()
        self._to_come = self._next_stop = self._total
        self.quarter_came = False

    def expect_all_but(self, leaf: nn.Parameter) -> None:
        """Expects all gradients anew but that of a leaf which has come already."""
        self.expect_all()
        self._to_come -= self.missing.pop(id(leaf), 0)

    def hook(self, leaf: nn.Parameter, act: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        """Returns a leaf's hook, which notes its gradient and calls `act` where the schedule may have to."""
        key = id(leaf)

        def note(leaf: nn.Parameter) -> None:
            if not self.missing:  # the first of a backward, or reached again by another graph task
                self.expect_all()
            self._to_come -= self.missing.pop(key, 0)
            if self._to_come <= self._next_stop:
                act(leaf)

        return note

    def go_on(self, every: bool) -> bool:
        """Notes that the unit's backward runs; decides after which gradient the schedule is to act next.

        Args:
            every: Whether after each that follows.

        Returns:
            Whether the gradients of all leaves have come.
        """
        self.progress = Progress.RUNNING
        self.quarter_came = self._to_come <= self._quarter
        if every:
            self._next_stop = self._to_come
        elif not self.quarter_came:
            self._next_stop = self._quarter
        else:
            self._next_stop = -1 if self.open_calls else 0
        return not self.missing

    def enter_derivative(self) -> None:
        """Notes that the unit's running backward is, in part, that of an earlier one.

        Triggers tell nothing of that part, which may need the leaves until the backward of the tree ends.
        """
        self.progress = Progress.RUNNING
        self.needed_to_end = True

    def end(self) -> bool:
        """Ends the unit's backward; returns whether there was one."""
        if self.progress is not Progress.RUNNING:
            return False
        self.progress = Progress.FINISHED
        self.missing = {}
        return True

    def forget(self) -> None:
        """Lets the schedule act after the next gradient, which is another backward's."""
        self.missing = {}
