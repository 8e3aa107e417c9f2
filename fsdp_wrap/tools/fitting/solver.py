"""Chooses one option for each unit: the least time for which no place of the step holds too much.

This is a knapsack with a bound at each unit. A unit's parameters and activations are held from its forward to
its backward, so at unit k the bytes of units 1 to k count. The states that nothing dominates are kept from
unit to unit, as in G. Nemhauser, Z. Ullmann: Discrete dynamic programming and capital allocation, 1969.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fsdp_wrap.tools.fitting.recipe import FREED
from fsdp_wrap.tools.planning import Plan
from fsdp_wrap.tools.planning.figures import BACKWARD, FORWARD, OPTIMIZER

Option = tuple[str, str]
"""The words for a unit's parameters and for its activations."""

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
    held: int
    beside: int


class _State(NamedTuple):
    held: int
    seconds: float
    options: Any  # a linked list: (options before, option)


def choose(units: Sequence[Mapping[_Option, Cost]], budget: int) -> list[_Option] | None:
    """Returns an option for each unit, in their order; None if nothing is within the budget."""
    states = [_State(0, 0.0, None)]
    for costs in units:
        grown = [
            _State(state.held + cost.held, state.seconds + cost.seconds, (state.options, option))
            for state in states
            for option, cost in costs.items()
            if state.held + cost.held + cost.beside <= budget
        ]
        states = []
        for state in sorted(grown, key=lambda state: state[:2]):  # those which no other one beats in both
            if not states or state.seconds < states[-1].seconds:
                states.append(state)
        if len(states) > _MOST_STATES:
            step = (len(states) - 1) / (_MOST_STATES - 1)
            states = [states[round(at * step)] for at in range(_MOST_STATES)]
    if not states:
        return None
    rest, chosen = states[-1].options, []
    while rest is not None:
        rest, option = rest
        chosen.append(option)
    return chosen[::-1]


def costs_of(names: Sequence[str], plans: Mapping[Option, Plan]) -> list[dict[Option, Cost]]:
    """Returns for each unit the cost of each option, from plans in which all units have it."""
    costs: list[dict[Option, Cost]] = [{} for _ in names]
    for option, plan in plans.items():
        figures = {unit.name: unit for unit in plan.units}
        units = [figures[name] for name in names]
        held = [unit.activation_bytes + unit.gathered_bytes * (option[0] != FREED) for unit in units]
        delay = 0.0 if plan.machine is None else 1 - plan.machine.overlap  # collectives slow the others down
        for of_unit, unit, own, beside in zip(costs, units, held, _beside(names, plan, held)):
            waits = (unit.wait_seconds or 0.0) + delay * (unit.communication_seconds or 0.0)
            of_unit[option] = Cost((unit.compute_seconds or 0.0) + waits, own, beside)
    return costs


def _beside(names: Sequence[str], plan: Plan, held: Sequence[int]) -> list[int]:
    """Returns for each unit the most bytes at its places in the step, without those that units hold there."""
    most, at = [0] * len(names), 0
    index = {name: number for number, name in enumerate(names)}
    before = [sum(held[: number + 1]) for number in range(len(held))]
    for moment in plan.moments:
        unit = index.get(moment.place.unit, 0)
        if moment.place.phase == FORWARD:
            at = max(at, unit)
        elif moment.place.phase == BACKWARD and moment.place.unit:
            at = unit
        elif moment.place.phase == OPTIMIZER:
            at = 0
        most[at] = max(most[at], moment.nbytes - before[at])
    return most
