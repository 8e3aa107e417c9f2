"""`Models`: which models a backward belongs to, where models share units."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fsdp_wrap._runtime import Step, Unit, units_in


class Totals(NamedTuple):
    """The backwards of all ranks: the sum of weights, the number, and ranks with unreduced gradients."""

    weights: float
    backwards: float
    owing: float


class Models:
    """The models of some trees. A unit that several models share runs in the step of one of them.

    Args:
        steps: The steps, the same on all ranks.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._units = [_units_of(step) for step in steps]

    def of_backward(self, ran: Collection[Step]) -> set[int]:
        """Returns the numbers of the models to which a backward belongs; of none if it is for inputs alone.

        Args:
            ran: The steps in which it ran; it has just ended in the last one.
        """
        reached = {unit for step in ran for unit in step.units if unit.was_reached}
        numbers = {
            model
            for model, units in enumerate(self._units)
            if any(unit.arrivals.some_came() for unit in reached & units)
            and any(self._is_own(unit) for unit in reached & units)
        }
        for step in ran:  # of a shared unit that runs by itself
            if step.gradients_came and not any(self._units[model] & {*step.units} for model in numbers):
                numbers.add(self._steps.index(step))
        return numbers

    def _is_own(self, unit: Unit) -> bool:
        return sum(unit in units for units in self._units) == 1

    def weights_of(self, unit: Unit, totals: Sequence[Totals]) -> float:
        """Returns the weights of the backwards of the models that have a unit; 0 if there were none.

        Raises a ValueError if models that share the unit have others each: one sum has one divisor.
        """
        counted = [
            (step.root.name, total.weights)
            for step, units, total in zip(self._steps, self._units, totals)
            if unit in units and total.backwards
        ]
        first, weights = next(iter(counted), ("", 0.0))
        for name, others in counted:
            if not math.isclose(weights, others, rel_tol=1e-9):
                raise ValueError(
                    f"{unit.name} is part of {first} and of another model, {name}, whose backwards inside "
                    f"uneven() weigh {weights:g} and {others:g} in total: a sum of both has no one mean. Use "
                    "one uneven() for each of the models, or average=False with losses divided by yourself"
                )
        return weights


def _units_of(step: Step) -> set[Unit]:
    """Returns the units of a model, also those that run in the step of another one."""
    units = {*step.units}
    return units if step.root.gone else units.union(units_in(step.root.module).values())
