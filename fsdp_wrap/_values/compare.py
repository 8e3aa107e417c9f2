"""Comparison of two records: by how much each seam departs, and which one is the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._values import files
from fsdp_wrap._values.files import Key, RankValues
from fsdp_wrap._values.statistics import Statistics

_OF_SHARDS = (files.SHARD, files.REDUCED, files.STEP, files.UPDATE)
_WHOLE = (files.PARAMETER, files.AGAIN)
_GRADIENTS = (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT)
_ROUNDING = {"float64": 1e-11, "float32": 3e-4, "bfloat16": 0.1, "float16": 0.02, "int64": 0.0}
"""Relative differences that rounding makes in a step, by dtype; the coarser one counts."""


_GIVEN = (files.SHARD, files.PARAMETER, files.AGAIN)
"""Seams at which values are rounded once at most, to their own dtype; so is the first input."""


def rounding_of(dtype: str) -> float:
    """Returns the relative difference that rounding to a dtype makes in a step."""
    return _ROUNDING.get(dtype, 3e-4)


@dataclass(frozen=True)
class SeamTotals:
    """Statistics of one seam of a unit over all ranks.

    `by_rank` has those of each rank that counts. `scale` is 1 / ranks for gradients of a rank's own loss.
    """

    sums: Statistics
    by_rank: dict[int, Statistics]
    scale: float
    passes: int

    @property
    def sketch(self) -> torch.Tensor:
        """The sketch, scaled."""
        return self.sums.sketch * self.scale


class Run:
    """The record of all ranks of one run."""

    def __init__(self, records: Sequence[RankValues]) -> None:
        self.records = records
        self.ranks = len(records)
        self.contributors = records[0].header.contributors

    @property
    def steps(self) -> list[int]:
        """The recorded steps of the first rank."""
        return sorted(self.records[0].steps)

    def keys(self, step: int) -> list[Key]:
        """Returns seams and units in the order of the step."""
        return [*self.records[0].steps[step].rows]

    def rounding(self, step: int) -> float:
        """Returns the relative difference that rounding makes in a step, by its coarsest dtype."""
        return max(rounding_of(row.dtype) for row in self.records[0].steps[step].rows.values())

    def totals(self, step: int, key: Key) -> SeamTotals | None:
        """Returns the statistics of a seam of a unit over all ranks; None without any."""
        seam, unit = key
        by_rank, passes = {}, 0
        for record in self.records:
            taken = record.steps.get(step)
            if taken is not None and key in taken.rows:
                passes = taken.passes
                by_rank[record.header.rank] = taken.rows[key]
        counted = [
            row
            for rank, row in by_rank.items()
            if seam not in _OF_SHARDS or not self.records[rank].header.copy.get(unit, 0)
        ]
        if not counted:
            return None
        sums = Statistics()
        for row in counted[:1] if seam in _WHOLE else counted:
            sums.merge(row)
        return SeamTotals(sums, by_rank, 1 / self.contributors if seam in _GRADIENTS else 1.0, passes)


@dataclass(frozen=True)
class Departure:
    """The difference of two records at one seam of a unit.

    Attributes:
        step: Number of the step.
        seam: Name of the seam.
        unit: Name of the unit.
        size: Relative size of the difference; 0 for the same bits.
        rounds: Size up to which rounding may make it.
        ranks: The ranks whose values differ by more than that, where both runs have as many.
        before: The totals of both.
        grown: Size to which rounding is known to have grown.
    """

    step: int
    seam: str
    unit: str
    size: float
    rounds: float
    ranks: tuple[int, ...]
    before: tuple[SeamTotals, SeamTotals]
    grown: float = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether the difference is larger than rounding makes it."""
        return not self.size <= self.rounds


def _cut_alike(first: Run, second: Run, ours: SeamTotals, theirs: SeamTotals) -> bool:
    """Whether each rank of one run has the pieces that it has in the other."""
    if any(one.header.copy != other.header.copy for one, other in zip(first.records, second.records)):
        return False
    counts, others = ({rank: row.numel for rank, row in totals.by_rank.items()} for totals in (ours, theirs))
    return counts == others


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the relative size of a difference."""
    size = max(one.norm().item(), other.norm().item())
    return (one - other).norm().item() / size if size else 0.0


def ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the factor that brings the first closest to the second; 0 if the first is zero."""
    square = one.dot(one).item()
    return one.dot(other).item() / square if square else 0.0


def difference(one: Statistics, other: Statistics, scales: tuple[float, float], linear: bool) -> float:
    """Returns the relative size of a difference; `linear` if only sums over elements are comparable."""
    if one.nan + one.inf != other.nan + other.inf:
        return math.inf
    alike = one.dtype == other.dtype and scales[0] == scales[1]
    if alike and one.checksum == other.checksum and one.numel == other.numel:
        return 0.0
    if one.numel != other.numel and not linear:
        return math.inf
    sizes = [apart(*(scale * statistics.sketch for statistics, scale in zip((one, other), scales)))]
    if not linear:
        for name in ("norm", "largest"):
            a, b = getattr(one, name) * scales[0], getattr(other, name) * scales[1]
            if name == "norm" or scales[0] == scales[1]:
                sizes.append(abs(a - b) / max(a, b) if max(a, b) else 0.0)
    return max(*sizes, 1e-12)


def departures(
    first: Run, second: Run, step: int, begins: bool, grown: Mapping[tuple[int, str, str], float]
) -> Iterator[Departure]:
    """Yields the difference at each seam of a step that both have, in the order of the first one's step.

    `begins` tells whether no step was rounded before. `grown` has sizes to which rounding may have grown.
    """
    coarsest = max(run.rounding(step) for run in (first, second))
    entered = next((key for key in first.keys(step) if key[0] == files.INPUT), None)
    for key in first.keys(step):
        ours, theirs = first.totals(step, key), second.totals(step, key)
        if ours is None or theirs is None:
            continue
        seam = key[0]
        same = first.ranks == second.ranks and first.contributors == second.contributors
        alike = same and ours.passes == theirs.passes
        summed = seam == files.REDUCED and max(ours.passes, theirs.passes) > 1
        linear = not alike and (seam == files.GRADIENT or summed)
        scales = ours.scale, theirs.scale
        own = max(rounding_of(totals.sums.dtype) for totals in (ours, theirs))
        given = seam in _GIVEN or key == entered
        limit = own if begins and given else max(own, coarsest)
        noise = grown.get((step, *key), 0.0)
        limit = max(limit, noise)
        size = difference(ours.sums, theirs.sums, scales, linear)
        ranks: list[int] = []
        if same and not linear and _cut_alike(first, second, ours, theirs):
            alone = {
                rank: difference(row, theirs.by_rank[rank], scales, seam in _OF_SHARDS)
                for rank, row in ours.by_rank.items()
            }
            size = max(size, *alone.values()) if seam not in _OF_SHARDS else size
            ranks = [rank for rank, its in alone.items() if not its <= limit]
        yield Departure(step, *key, size, limit, tuple(ranks), (ours, theirs), noise)
