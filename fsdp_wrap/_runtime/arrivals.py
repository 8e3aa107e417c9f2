"""`Arrivals`: the gradients that a unit has and awaits in the running backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn


@dataclass(eq=False)
class Arrivals:
    """Gradients that a unit has and awaits in the running backward of its tree.

    Leaf hooks note each gradient here, and call the step only where it may have to act: after the first
    gradient unless it has acted before, at a quarter of the bytes if reductions are in flight, and after the
    last gradient unless inputs are awaited too. Leaves are stored by id: their hooks reference this object.

    Attributes:
        missing: Weight (about bytes) of each leaf without its gradient, by id.
        quarter_came: Whether a quarter of the weight had come when the step acted last.
        open_calls: Number of forward calls that wait for gradients of their watched inputs.
        inputs_done: Whether there were such calls, and none waits any more.
        owes: Whether a reduction is due, even without gradients: other ranks may have some.
        every: Whether the step acts after each gradient.
    """

    missing: dict[int, int] = field(default_factory=dict)
    quarter_came: bool = False
    open_calls: int = 0
    inputs_done: bool = False
    owes: bool = False
    every: bool = False
    _weights: dict[int, int] = field(default_factory=dict)
    _total: int = 0
    _to_come: int = 0
    _quarter: int = 0
    _next_stop: int = 0

    def expect(self, leaves: Iterable[nn.Parameter]) -> None:
        """Sets the leaves whose gradients each backward brings."""
        self._weights = {id(leaf): 1 + leaf.nbytes for leaf in leaves}
        self._total = sum(self._weights.values())
        self._quarter = self._total * 3 // 4

    def begin(self, every: bool) -> None:
        """Prepares for a backward of the tree, which may not reach the unit."""
        self.open_calls, self.every = 0, every
        self.inputs_done = self.owes = self.quarter_came = False
        self.missing = self._weights.copy()
        self._to_come = self._next_stop = self._total

    def expect_all(self) -> None:
        """Expects all gradients anew."""
        self.missing, self.quarter_came = self._weights.copy(), False
        self._to_come = self._next_stop = self._total

    def expect_all_but(self, leaf: nn.Parameter) -> None:
        """Expects all gradients anew, except that of one leaf, which has come."""
        self.expect_all()
        self._to_come -= self.missing.pop(id(leaf), 0)

    def hook(self, leaf: nn.Parameter, act: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
        """Returns a leaf's hook: notes the gradient, and calls `act` where the step may have to act."""
        return _LeafHook(self, act)

    def go_on(self, at_quarter: bool = True) -> None:
        """Sets when the step acts next; `at_quarter` tells whether at a quarter of the bytes."""
        self.quarter_came = self._to_come <= self._quarter
        later = (-1 if self.open_calls else 0) if self.quarter_came or not at_quarter else self._quarter
        self._next_stop = self._to_come if self.every else later

    def some_came(self) -> bool:
        """Whether the running backward has brought any gradient, few as they may be."""
        return self._to_come < self._total

    def end(self) -> None:
        """Awaits no more gradients: the step acts after the next one, the first of another backward."""
        self.missing = {}


class _LeafHook:
    """The hook of a leaf: one object, where a function with its variables would be five."""

    __slots__ = ("_act", "_arrivals")

    def __init__(self, arrivals: Arrivals, act: Callable[[nn.Parameter], None]) -> None:
        self._arrivals, self._act = arrivals, act

    def __call__(self, leaf: nn.Parameter) -> None:
        arrivals = self._arrivals
        if not arrivals.missing:  # first gradient of a backward, or another graph task's
            arrivals.expect_all()
        arrivals._to_come -= arrivals.missing.pop(id(leaf), 0)
        if arrivals._to_come <= arrivals._next_stop:
            self._act(leaf)
