"""Chooses one option for each unit: the least time for which no place of the step holds too much.

This is a knapsack with a bound at each unit. A unit's parameters and activations are held from its forward to
its backward, so at unit k the bytes of units 1 to k count. The states that nothing dominates are kept from
unit to unit, as in G. Nemhauser, Z. Ullmann: Discrete dynamic programming and capital allocation, 1969.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

_Option = TypeVar("_Option", bound=Hashable)

_MOST_STATES = 4000
"""States that are kept at a unit; more are thinned out, and the answer may then miss the best by a little."""


class Cost(NamedTuple):
    """One option of one unit.

    Attributes:
        seconds: Its time in a step.
        held: Bytes that it holds from its forward to its backward.
        beside: Bytes at its own places in the step, beside those that units hold.
    """

    seconds: float
    held: float
    beside: float


class _State(NamedTuple):
    held: float
    seconds: float
    options: Any  # a linked list: (option, options before)


def choose(units: Sequence[Mapping[_Option, Cost]], budget: float) -> list[_Option] | None:
    """Returns an option for each unit, in their order; None if nothing is within the budget."""
    states = [_State(0.0, 0.0, None)]
    for costs in units:
        grown = (
            _State(state.held + cost.held, state.seconds + cost.seconds, (option, state.options))
            for state in states
            for option, cost in costs.items()
            if state.held + cost.held + cost.beside <= budget
        )
        states = _undominated(grown)
    if not states:
        return None
    options, chosen = states[-1].options, []
    while options is not None:
        option, options = options
        chosen.append(option)
    return chosen[::-1]


def _undominated(states: Any) -> list[_State]:
    """Returns the states for which no other holds less and takes less time, the smallest first."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    if len(kept) > _MOST_STATES:
        step = (len(kept) - 1) / (_MOST_STATES - 1)
        kept = [kept[round(at * step)] for at in range(_MOST_STATES)]
    return kept


def needed(units: Sequence[Mapping[_Option, Cost]], chosen: Sequence[_Option]) -> float:
    """Returns the most bytes at any place, with these options."""
    held = most = 0.0
    for costs, option in zip(units, chosen):
        held += costs[option].held
        most = max(most, held + costs[option].beside)
    return most
