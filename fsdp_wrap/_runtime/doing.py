"""`Activity`: what a unit does, in forward and in backward."""

from __future__ import annotations

from enum import Enum

from fsdp_wrap._runtime.arrivals import Arrivals


class Doing(Enum):
    """What a unit does.

    Attributes:
        REST: Nothing, and no backward has reached it since its last forward began.
        FORWARD: A forward call of it runs.
        BACKWARD: The tree's backward has reached it and not left it; forward calls inside recompute.
        OVER: Nothing: its part of the running backward, or of the last one, is over.
    """

    REST = "rest"
    FORWARD = "forward"
    BACKWARD = "backward"
    OVER = "backward over"


TURNS = (
    (Doing.REST, Doing.FORWARD),
    (Doing.OVER, Doing.FORWARD),
    (Doing.FORWARD, Doing.REST),
    (Doing.REST, Doing.BACKWARD),
    (Doing.FORWARD, Doing.BACKWARD),  # a backward inside the forward
    (Doing.OVER, Doing.BACKWARD),  # of another forward call, or of another graph
    (Doing.BACKWARD, Doing.OVER),
    (Doing.OVER, Doing.REST),
)
"""The moves that are allowed."""


class Activity:
    """What a unit does: one state, of which each move is asserted.

    Attributes:
        doing: The state.
        running: Number of forward calls in progress, recomputations too.
        arrivals: Gradients that have come in the running backward.
    """

    def __init__(self) -> None:
        self.doing, self.running = Doing.REST, 0
        self.arrivals = Arrivals()

    def _turn(self, doing: Doing) -> None:
        assert (self.doing, doing) in TURNS, (self.doing, doing)
        self.doing = doing

    def begin_call(self, recompute: bool) -> None:
        """Notes that a forward call begins; a recomputation is part of a backward."""
        self.running += 1
        if not recompute and self.doing is not Doing.FORWARD:
            self._turn(Doing.FORWARD)

    def end_call(self) -> None:
        """Notes that a forward call is over."""
        self.running -= 1
        if self.doing is Doing.FORWARD and not self.running:
            self._turn(Doing.REST)

    def await_backward(self, every: bool) -> None:
        """Prepares for a backward of the tree, which may not reach the unit; see `Arrivals` for `every`."""
        if self.doing is Doing.OVER:
            self._turn(Doing.REST)
        self.arrivals.begin(every)

    def reach(self) -> None:
        """Notes that the tree's backward has reached the unit."""
        if self.doing is not Doing.BACKWARD:
            self._turn(Doing.BACKWARD)

    def end_backward(self) -> bool:
        """Ends the unit's backward; returns whether one was running."""
        if self.doing is not Doing.BACKWARD:
            return False
        self._turn(Doing.OVER)
        self.arrivals.end()
        return True

    def forget_backward(self) -> None:
        """Ends the unit's backward, if one runs, though gradients may be missing."""
        self.end_backward()
        self.arrivals.end()

    @property
    def was_reached(self) -> bool:
        """Whether the running backward, or the last one, has reached the unit."""
        return self.doing in (Doing.BACKWARD, Doing.OVER)
