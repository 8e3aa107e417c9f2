"""`Pair`: what was observed of a plain and of a sharded run, and sums over both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure, Run, apart, departures, ratio
from fsdp_wrap._values.statistics import Statistics
from fsdp_wrap._values.verdict import Verdict, is_scaled, judge
from fsdp_wrap._values.verifying.observe import Observed

_BACKWARD = (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT, files.REDUCED)
_GROWTH = 5.0
"""How many times as large as that of a rounded run a difference may be."""
_CLOSE = 0.02
"""Relative size of what may be left of a difference that is explained."""

Grown = Mapping[tuple[int, str, str], float]


class Pair:
    """A plain and a sharded run.

    Args:
        plain: The observations of the one rank.
        sharded: The observations of each rank.
        rounded: The plain run once more with rounded parameters; None if it was not needed.
    """

    def __init__(
        self,
        plain: Sequence[Observed],
        sharded: Sequence[Observed],
        rounded: Sequence[Observed] | None = None,
    ) -> None:
        self.plain, self.sharded = plain[0], sharded
        self.alone, self.ranks = (Run([observed.values for observed in run]) for run in (plain, sharded))
        self.steps = [step for step in self.alone.steps if step in self.ranks.steps]
        self.grown: Grown = (
            {} if rounded is None else self._growth(Run([observed.values for observed in rounded]))
        )

    def _growth(self, rounded: Run) -> Grown:
        steps = [step for step in self.steps if step in rounded.steps]
        differences = (
            departure for step in steps for departure in departures(self.alone, rounded, step, False, {})
        )
        return {
            (departure.step, departure.seam, departure.unit): _GROWTH * departure.size
            for departure in differences
        }

    def verdict(self) -> Verdict:
        """Compares the two, seam by seam."""
        return judge(self.alone, self.ranks, self.grown, _suspects)

    def departures(self, step: int) -> list[Departure]:
        """Returns how far the seams of a step depart."""
        return [*departures(self.alone, self.ranks, step, step == self.steps[0], self.grown)]

    def tolerance(self, step: int) -> float:
        """Returns the relative difference that may remain once a cause explains the rest."""
        return max(_CLOSE, self.alone.rounding(step), self.ranks.rounding(step))

    def rows(self, step: int, seam: str, rank: int | None = None) -> dict[str, Statistics]:
        """Returns the statistics of a seam by unit: of a rank of the sharded run, or of the plain one."""
        run = self.alone.records[0] if rank is None else self.ranks.records[rank]
        return {unit: row for (other, unit), row in run.steps[step].rows.items() if other == seam}

    def sketch(self, step: int, seam: str, rank: int | None = None) -> torch.Tensor:
        """Returns the sketches of all units, one after the other; zeros where there is none."""
        rows = self.rows(step, seam, rank)
        units = sorted({"", *self.plain.units, *self.sharded[0].units})
        return torch.cat([rows.get(unit, Statistics()).sketch for unit in units])

    def norm(self, step: int, seam: str, rank: int | None = None) -> float:
        """Returns the norm over all units."""
        return math.sqrt(sum(row.squares for row in self.rows(step, seam, rank).values()))

    def own_gradients(self, step: int) -> torch.Tensor:
        """Returns the sketches of the ranks' own gradients, by rank, each as its part of the mean."""
        own = [self.sketch(step, files.GRADIENT, rank) for rank in range(self.ranks.ranks)]
        return torch.stack(own) / self.ranks.contributors

    def reduced(self, step: int) -> torch.Tensor:
        """Returns the sketches of the reduced gradient of the sharded run."""
        copies = [max(record.header.copy.values(), default=0) for record in self.ranks.records]
        parts = [self.sketch(step, files.REDUCED, rank) for rank, copy in enumerate(copies) if not copy]
        return torch.stack(parts).sum(0)


def factor(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Returns the number by which the first is to be multiplied to be the second, if there is one."""
    if not one.any():
        return None
    scale = ratio(one, other)
    return scale if apart(one * scale, other) <= _CLOSE else None


def _suspects(differences: Sequence[Departure]) -> Sequence[Departure]:
    """Leaves out the seams of the backward, if optimizers see equal gradients in the end."""
    last = [departure for departure in differences if departure.seam == files.STEP]
    if not last or any(departure.exceeds or is_scaled(departure) for departure in last):
        return differences
    return [departure for departure in differences if departure.seam not in _BACKWARD]
