"""The search for the largest batch of a configuration that fits, and for its fastest recipe.

Both are one search: for the last that fits of variations that need more and more memory. These are batches,
or budgets of bytes, for each of which the solver finds the fastest recipe by figures of single units. Every
answer is a plan of the whole step.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_wrap.tools.fitting.answer import Choice, Values
from fsdp_wrap.tools.fitting.recipe import (
    ALWAYS,
    FREED,
    INPUTS_ON_HOST,
    ON_HOST,
    RECOMPUTED,
    STAY,
    TO_BACKWARD,
    Recipe,
    UnitRecipe,
)
from fsdp_wrap.tools.fitting.solver import Option, choose, costs_of
from fsdp_wrap.tools.planning import Plan
from fsdp_wrap.tools.planning.figures import FORWARD
from fsdp_wrap.tools.setups import REFUSALS, first_line

_FIRST_BATCHES = 2, 4  # a batch of 1 has fewer copies than others
_MOST_SAMPLES = 1 << 20
_LOOKS = 6  # plans in search of one answer, at most
_SAME = 1.002  # speeds that count as equal: then the plainer recipe stays
_LAYOUTS = 2, 4, 0  # neighbouring blocks that make a unit, besides 1; 0 for all


@dataclass
class Search:
    """Plans one configuration with batches and recipes.

    Attributes:
        plan_with: Plans the setup with further arguments.
        ranks: Number of ranks.
        values: The arguments that stay, except the batch.
        limit: The bytes that a rank may use.
        batch: The batch; None if it is to be found, or `setup` takes none.
        recipe: The recipe; None if it is to be found, or `setup` takes none.
        finds_batch: Whether the largest batch is to be found.
        runs: Recipes without units, from which the search begins; empty where none is to be found.
        offloads: Whether activations may leave for the host.
        best: The fastest choice that fits, of all that were planned.
        known: All that was planned, by batch and recipe.
        error: The first error of what could not be planned.
    """

    plan_with: Callable[..., Plan]
    ranks: int
    values: Values
    limit: int
    batch: int | None = None
    recipe: Recipe | None = None
    finds_batch: bool = False
    runs: Sequence[Recipe] = ()
    offloads: bool = False
    best: Choice | None = None
    known: dict[tuple[int | None, Recipe | None], Choice] = field(default_factory=dict)
    error: Exception | None = None
    _blocks: Sequence[str] = ()

    def choices(self) -> Iterator[Choice]:
        """Yields the answers as they are found; a run that would be slower in any case has none."""
        for run in self.runs or (None,):
            try:
                choices = [self._at_largest_batch(self.recipe)] if run is None else self._of_run(run)
            except REFUSALS as error:
                self.error = self.error or error
                choices = [
                    Choice(ranks=self.ranks, values=self.values, recipe=run, refused=first_line(error))
                ]
            yield from choices
        if self.runs and self.best is not None:
            yield from self._with_other_borders(self.best)

    def look(self, batch: int | None, recipe: Recipe | None) -> Choice:
        """Returns the choice of a batch and a recipe, which is planned once."""
        if (batch, recipe) not in self.known:
            given = {"batch": batch, "recipe": recipe}
            made = self.plan_with(**{name: value for name, value in given.items() if value is not None})
            seconds, speed = made.predicted_seconds, None
            if seconds and batch is not None:
                speed = batch * int(self.values.get("accumulation", 1)) * self.ranks / seconds
            choice = Choice(
                ranks=self.ranks,
                values=self.values,
                batch=batch,
                recipe=recipe,
                fits=made.needed_bytes <= self.limit,
                peak_bytes=made.needed_bytes,
                predicted_seconds=seconds,
                samples_per_second=speed,
                plan=made,
            )
            self.known[batch, recipe] = choice
            is_answer = choice.fits and (recipe is None or recipe.units)
            if is_answer and (self.best is None or choice.speed > self.best.speed * _SAME):
                self.best = choice
        return self.known[batch, recipe]

    def _at_largest_batch(self, recipe: Recipe | None) -> Choice:
        """Returns the choice with the largest batch that fits, or with one sample if none does."""
        if not self.finds_batch:
            return self.look(self.batch, recipe)
        batches, (first, _) = range(1, _MOST_SAMPLES + 1), _FIRST_BATCHES
        batch = last_that_fits(batches, lambda batch: self.look(batch, recipe), self.limit, _FIRST_BATCHES)
        choice = self.look(batch or 1, recipe)
        if choice.batch == _MOST_SAMPLES and choice.peak_bytes == self.look(first, recipe).peak_bytes:
            raise ValueError(
                f"setup(batch={first}) and setup(batch={_MOST_SAMPLES}) need the same memory: let setup() "
                "use its batch, or give it no such argument"
            )
        return choice

    # recipes

    def _of_run(self, run: Recipe) -> list[Choice]:
        """Returns the answers with a run's recipes.

        A free batch is the largest with all kept, and the largest with all freed and computed again.
        """
        units = self._units_of(run)
        if not self.finds_batch:
            return self._climbed(run, units, self.batch)
        rich = self._at_largest_batch(_alike(run, units, TO_BACKWARD, STAY))
        lean = self._at_largest_batch(_alike(run, units, FREED, RECOMPUTED))
        if rich.fits and rich.batch == lean.batch:
            return [rich]
        return [*([rich] if rich.fits else []), *self._climbed(run, units, lean.batch)]

    def _with_other_borders(self, best: Choice) -> Iterator[Choice]:
        """Yields the best choice's run with several blocks in a unit."""
        run: Any = best.recipe
        for together in _LAYOUTS:
            with suppress(*REFUSALS):  # units of a model that setup() shards have their borders
                variant = replace(run, units=(), together=together)
                yield from self._climbed(variant, self._units_of(variant), best.batch)

    def _units_of(self, run: Recipe) -> list[UnitRecipe]:
        """Returns the units of a run, in the order of their first forwards."""
        made: Any = self.look(_FIRST_BATCHES[0] if self.finds_batch else self.batch, run).plan
        names = [unit.name for unit in made.units if " (mesh " not in unit.name]
        if run.together == 1:
            self._blocks = [name for name in names if name]
        size = run.together or len(self._blocks)
        groups = [tuple(self._blocks[at : at + size]) for at in range(0, len(self._blocks), size or 1)]
        members = {group[0]: group for group in groups}
        order = [moment.place.unit for moment in made.moments if moment.place.phase == FORWARD]
        order = [name for name in dict.fromkeys([*order, *names]) if name in names]
        return [UnitRecipe(members.get(name, (name,))) for name in order]

    def _climbed(self, run: Recipe, units: Sequence[UnitRecipe], batch: int | None) -> list[Choice]:
        """Returns the fastest choice of a run that fits, or the smallest; none if it could not be faster."""

        def alike(parameters: str, activations: str) -> Choice:
            return self.look(batch, _alike(run, units, parameters, activations))

        rich = alike(TO_BACKWARD, STAY)
        if self.best is not None and self.best is not rich and rich.speed <= self.best.speed * _SAME:
            return []
        longer = _may_keep_longer(rich)
        if longer or not rich.fits:
            parameters = (FREED, TO_BACKWARD, ALWAYS) if longer else (FREED, TO_BACKWARD)
            self._climb(run, units, batch, itertools.product(parameters, (STAY, RECOMPUTED)))
            if self.offloads:
                leanest = () if alike(FREED, RECOMPUTED).fits else (INPUTS_ON_HOST,)
                activations = (STAY, RECOMPUTED, ON_HOST, *leanest)
                self._climb(run, units, batch, itertools.product(parameters, activations))
        return [min(self._planned(run, batch), key=lambda choice: choice.order)]

    def _climb(
        self, run: Recipe, units: Sequence[UnitRecipe], batch: int | None, options: Iterable[Option]
    ) -> None:
        """Plans recipes of growing budgets, for which the units' figures give options."""
        plans: Any = {option: self.look(batch, _alike(run, units, *option)).plan for option in options}
        costs = costs_of([unit.modules[0] for unit in units], plans)
        peaks = [made.peak_bytes for made in plans.values()]

        def within(budget: int) -> Choice:
            chosen: Any = choose(costs, budget)  # there is one: that with the least peak
            return self.look(batch, _with(run, units, chosen))

        budgets = range(min(peaks), max(peaks) + 1)
        last_that_fits(budgets, within, self.limit, (budgets[0], budgets[-1]))

    def _planned(self, run: Recipe, batch: int | None) -> list[Choice]:
        """Returns all that was planned of a run at a batch."""
        return [
            choice
            for (of_batch, recipe), choice in self.known.items()
            if of_batch == batch and recipe is not None and recipe.units and replace(recipe, units=()) == run
        ]


def _alike(run: Recipe, units: Sequence[UnitRecipe], parameters: str, activations: str) -> Recipe:
    """Returns a recipe whose units have the same option."""
    return _with(run, units, [(parameters, activations)] * len(units))


def _with(run: Recipe, units: Sequence[UnitRecipe], options: Iterable[Option]) -> Recipe:
    """Returns a recipe whose units have these options."""
    made = (
        replace(unit, parameters=parameters, activations=activations)
        for unit, (parameters, activations) in zip(units, options)
    )
    return replace(run, units=tuple(made))


def _may_keep_longer(choice: Choice) -> bool:
    """Whether parameters that stay after backward may save a gather: of frozen units, or between batches."""
    units = () if choice.plan is None else choice.plan.units
    return any(unit.gathers > 1 or (unit.gathers and not unit.reductions) for unit in units)


def last_that_fits(
    steps: Sequence[int], look: Callable[[int], Choice], limit: int, begin: Sequence[int]
) -> int | None:
    """Returns the last step that fits; None if none does.

    Memory grows along the steps: what was not looked at is extrapolated from what was.

    Args:
        steps: Numbers in ascending order, of which memory is about a linear function.
        look: Plans the choice at a step.
        limit: The bytes that fit.
        begin: The steps that are planned first.
    """
    known = {step: look(step) for step in begin}
    for turn in range(_LOOKS):
        fitting, failing = _split(known)
        low = steps.index(fitting[-1]) if fitting else -1
        high = steps.index(failing[0]) if failing else len(steps)
        between = range(low + 1, high)
        if not between or (fitting and _guess(known, steps[between[0]]) > limit):
            break
        too_much = bisect_left(between, True, key=lambda index: _guess(known, steps[index]) > limit)
        index = between[max(too_much - 1, 0)]
        if turn > 2 and turn % 2 and failing:
            index = (low + high) // 2  # bisect where guesses are bad
        known[steps[index]] = look(steps[index])
    fitting, _ = _split(known)
    return fitting[-1] if fitting else None


def _split(known: Mapping[int, Choice]) -> tuple[list[int], list[int]]:
    """Returns the steps that fit, and those that do not."""
    steps = sorted(known)
    count = sum(known[step].fits for step in steps)
    return steps[:count], steps[count:]


def _guess(known: Mapping[int, Choice], step: int) -> float:
    """Returns the peak bytes at a step, extrapolated from the two planned ones nearest to the limit."""
    fitting, failing = _split(known)
    pair = [*fitting[-1:], *failing[:1]] if fitting and failing else fitting[-2:] or failing[:2]
    if len(pair) == 1:
        return float(known[pair[0]].peak_bytes)
    (places, first), (others, second) = (_needs(known[near]) for near in pair)
    if places != others:  # different steps: only their peaks compare
        first, second = ([known[near].peak_bytes] for near in pair)
    part = (step - pair[0]) / (pair[1] - pair[0])
    return max(a + (b - a) * part for a, b in zip(first, second))


def _needs(choice: Choice) -> tuple[tuple[Any, ...], list[int]]:
    """Returns the places of a step, and the bytes of each place, of the first step and of building."""
    plan: Any = choice.plan
    numbers = [moment.nbytes for moment in plan.moments]
    return tuple(moment.place for moment in plan.moments), [
        *numbers,
        plan.first_peak_bytes,
        plan.setup_peak_bytes,
    ]
