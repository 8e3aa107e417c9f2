"""`Verdict`: the first seam at which two records depart, and what that looks like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure, Run, SeamTotals, departures, difference, ratio
from fsdp_wrap._values.statistics import Statistics

_CLOSE = 0.02
"""Relative size of what may be left of a difference that is explained."""
_LEAST_FACTOR = 2e-3
"""Difference from which on a factor is no rounding."""

_SAME = 1e-5
"""Relative size up to which two sketches are of the same values."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        kind: "equal", "rounding", "scale", "missing sum", "doubled sum", "stale", "other input", "other
            computation", "other parameters", "other update" or "not finite".
        told: A sentence about it.
        first: The first departure, larger than rounding if there is one; None for equal records.
        steps: The departures of the step in which that is, in the order of the step.
    """

    kind: str
    told: str
    first: Departure | None
    steps: Sequence[Departure]


def judge(
    first: Run,
    second: Run,
    grown: Mapping[tuple[int, str, str], float] = MappingProxyType({}),
    suspects: Callable[[Sequence[Departure]], Sequence[Departure]] = lambda given: given,
) -> Verdict:
    """Compares two records, step by step.

    Args:
        first: One of them.
        second: The other one.
        grown: Sizes to which rounding may have grown, by step, seam and unit, where that is known.
        suspects: Chooses the departures of a step that may be faults.

    Raises:
        ValueError: If they have no step, or no seam, in common.
    """
    common = [step for step in first.steps if step in second.steps]
    if not common:
        raise ValueError(f"the records have no step in common: {first.steps} and {second.steps}")
    rounded: Verdict | None = None
    differences: list[Departure] = []
    for step in common:
        differences = [*departures(first, second, step, step == common[0], grown)]
        if not differences:
            raise ValueError(
                f"the records have no unit in common in step {step}: give record_values() of the plain "
                "module the names of the units"
            )
        large = next(
            (departure for departure in suspects(differences) if departure.exceeds or is_scaled(departure)),
            None,
        )
        if large is not None:
            kind, told = _explain(first, second, large, differences)
            return Verdict(kind, told, large, differences)
        small = next((departure for departure in differences if departure.size), None)
        if small is not None and rounded is None:
            rounded = Verdict("rounding", "It looks like rounding", small, differences)
    return rounded or Verdict("equal", "All that both have recorded is equal, bit for bit", None, differences)


def is_scaled(departure: Departure) -> bool:
    """Whether a factor explains a difference whose size could be rounding."""
    return departure.size > max(_LEAST_FACTOR, departure.grown) and _factor(departure) is not None


def _explain(first: Run, second: Run, large: Departure, differences: Sequence[Departure]) -> tuple[str, str]:
    """Returns the kind and the explanation of a departure that is not rounding."""
    ours, theirs = large.before
    if ours.sums.nan + ours.sums.inf != theirs.sums.nan + theirs.sums.inf:
        return "not finite", "One has values that are not finite: look with fsdp_wrap.find_nonfinite()"
    if large.seam in (files.PARAMETER, files.AGAIN):
        return _explain_gathered(first, second, large)
    if large.seam == files.REDUCED:
        summed = _explain_sum("the first", first, large) or _explain_sum("the second", second, large)
        if summed is not None:
            return summed
    factor = _factor(large)
    if factor is not None:
        return _explain_factor(factor, max(first.ranks, second.ranks))
    if large is next((departure for departure in differences if departure.seam == files.INPUT), None):
        return "other input", "It looks like another input: all before it is equal"
    if large.seam == files.SHARD:
        return "other parameters", "The parameters differ already: other weights, or changed between steps"
    if large.seam == files.UPDATE:
        return "other update", "Gradients are equal: it looks like other settings of the optimizer"
    told = "What goes in is equal: it looks like another computation, or other random numbers (dropout)"
    return "other computation", told


def _sketch_of(totals: SeamTotals, ranks: Sequence[int]) -> torch.Tensor:
    """Returns the sketch of some ranks, or of all if there are none."""
    taken = Statistics()
    for rank in ranks:
        taken.merge(totals.by_rank[rank])
    return taken.sketch * totals.scale if ranks else totals.sketch


def _factor(large: Departure) -> float | None:
    """Returns the number by which the first record's values are to be multiplied, if there is one."""
    ours, theirs = (_sketch_of(totals, large.ranks) for totals in large.before)
    factor = ratio(ours, theirs)
    least = min((theirs - ours).norm(), theirs.norm())
    return factor if (theirs - factor * ours).norm() <= _CLOSE * least else None


def _explain_factor(factor: float, ranks: int) -> tuple[str, str]:
    told = f"The second has {factor:.4g} times the first"
    if ranks > 1 and math.isclose(factor, ranks, rel_tol=_CLOSE):
        return "scale", f"{told}: it looks like a missing division by the {ranks} ranks"
    if ranks > 1 and math.isclose(factor, 1 / ranks, rel_tol=_CLOSE):
        return "scale", f"{told}: it looks like a division by the {ranks} ranks too many"
    if math.isclose(factor, 2.0, rel_tol=_CLOSE):
        return "doubled sum", f"{told}: it looks like a doubled sum"
    return "scale", f"{told}: it looks like a factor, of the loss, a learning rate or a mean"


def _explain_gathered(first: Run, second: Run, large: Departure) -> tuple[str, str]:
    """Looks in which record the gathered parameters are not the shards, and where they come from."""
    for name, run in (("the first", first), ("the second", second)):
        shard = run.totals(large.step, (files.SHARD, large.unit))
        full = run.totals(large.step, (large.seam, large.unit))
        if shard is None or full is None:
            continue
        for rank, own in full.by_rank.items():
            if difference(own, shard.sums, (1.0, 1.0), linear=True) <= large.rounds:
                continue
            step = _step_of(own, run, large)
            if step is not None:
                told = f"In {name} record, rank {rank} has gathered stale values, those of step {step}"
                return "stale", told
            told = f"In {name} record, rank {rank} has gathered other values than the shards have"
            return "other parameters", told
    return "other parameters", "The parameters differ"


def _step_of(gathered: Statistics, run: Run, large: Departure) -> int | None:
    """Returns the last step whose shards had the gathered values; None without one."""
    for step in [earlier for earlier in run.steps if earlier <= large.step][::-1]:
        for seam in (files.SHARD, files.UPDATE):
            old = run.totals(step, (seam, large.unit))
            if old is not None and difference(gathered, old.sums, (1.0, 1.0), linear=True) <= _SAME:
                return step
    return None


def _explain_sum(name: str, run: Run, large: Departure) -> tuple[str, str] | None:
    """Compares a reduced gradient with the ranks' own, whose mean it should be."""
    own = run.totals(large.step, (files.GRADIENT, large.unit))
    reduced = run.totals(large.step, (files.REDUCED, large.unit))
    if own is None or reduced is None or len(own.by_rank) != run.ranks:
        return None
    result, whole = reduced.sketch * run.contributors, own.sums.sketch
    left = result - whole
    if left.norm() <= max(large.rounds, 1e-5) * whole.norm():
        return None
    for rank, row in own.by_rank.items():
        for sign, kind, told in ((-1, "missing sum", "is missing in"), (1, "doubled sum", "is twice in")):
            if (left - sign * row.sketch).norm() <= _CLOSE * row.sketch.norm():
                return kind, f"In {name} record, the gradient of rank {rank} {told} the reduced gradient"
    factor = ratio(whole, result)
    if (result - factor * whole).norm() <= _CLOSE * result.norm() and abs(factor - 1) > large.rounds:
        told = (
            f"In {name} record, the reduced gradient is {factor:.4g} times the mean of the ranks' gradients"
        )
        if math.isclose(factor, run.ranks, rel_tol=_CLOSE):
            told += f": a division by the {run.ranks} ranks is missing"
        return "scale", told
    return None
