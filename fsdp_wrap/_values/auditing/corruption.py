"""`Corruption`: a value that is not what it must be, and what follows from the evidence of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from fsdp_wrap._values.finding import FoundError, quoted, ranked

SHARD, GATHER, FORWARD, BACKWARD = "shard", "gather", "forward", "backward"
REDUCTION, UPDATE = "reduction", "update"
_PART = attrgetter("unit", "owner")
_PHASES = (SHARD, GATHER, FORWARD, BACKWARD, REDUCTION, UPDATE)


@dataclass(frozen=True)
class Corruption:
    """A value that a rank holds, received or computed, and that is wrong.

    Attributes:
        rank: The rank.
        step: Number of the step since `audit`.
        phase: "shard", "gather", "forward", "backward", "reduction" or "update".
        unit: Fully qualified name of the unit, "" for the root.
        tensor: Name of the tensor.
        told: A sentence about how that is known.
        index: Index of the first wrong element, or of the first of the few among which it is; None if
            unknown.
        shape: Shape of the tensor; None if unknown.
        count: Number of wrong elements, or for a reduction of wrong blocks of elements; -1 if unknown.
        suspects: The ranks one of which is wrong, where that is all that is known; else the rank alone.
        owner: The rank whose part of a gathered buffer is wrong; -1 for other phases.
    """

    rank: int
    step: int
    phase: str
    unit: str
    tensor: str
    told: str
    index: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    count: int = -1
    suspects: tuple[int, ...] = ()
    owner: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "suspects", self.suspects or (self.rank,))

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the first finding of a step has the smallest."""
        return _PHASES.index(self.phase), self.rank

    def describe(self) -> str:
        """Returns the finding as sentences."""
        who = f"{'one of the ' * (len(self.suspects) > 1)}{ranked(self.suspects)}"
        many = "" if self.count < 0 else f"{self.count} wrong, "
        where = ""
        if self.index is not None and self.shape is not None:
            where = f" ({many}the first at {[*self.index]} in {[*self.shape]})"
        return (
            f"step {self.step}, {who}, unit {quoted(self.unit)}, phase {self.phase}: {self.tensor} is wrong"
            f"{where}. {self.told}"
        )


class CorruptionError(FoundError[Corruption]):
    """A rank holds, received or computed a wrong value; the same error on all ranks.

    Args:
        text: The message.

    Attributes:
        first: The first finding.
        also: The others of the step.
    """


def text_of(first: Corruption, also: Sequence[Corruption]) -> str:
    """Returns the message about findings."""
    others = "".join(f" Also: {other.describe()}." for other in also)
    return f"audit(): {first.describe()}.{others} The hardware of that rank computes, keeps or sends wrong"


def causes(findings: Iterable[Corruption], members: Callable[[str], frozenset[int]]) -> list[Corruption]:
    """Returns the findings that do not follow from others, in the order of a step; alike on all ranks.

    Args:
        findings: The findings of all ranks.
        members: Returns the ranks that share a unit, by its name.
    """
    all_found = sorted(findings, key=lambda finding: finding.order)
    shards = {(finding.rank, finding.unit) for finding in all_found if finding.phase == SHARD}
    shards -= {(finding.rank, finding.unit) for finding in all_found if len(finding.suspects) > 1}
    kept: dict[tuple[str, int, str], Corruption] = {}
    for finding in _blamed(all_found, members):
        if finding.phase == GATHER and (finding.owner, finding.unit) in shards:
            continue  # the owner's shard is wrong
        if len(finding.suspects) > 1 and any((rank, finding.unit) in shards for rank in finding.suspects):
            continue
        if finding.phase == BACKWARD and (FORWARD, finding.rank, finding.unit) in kept:
            continue
        kept.setdefault((finding.phase, finding.rank, finding.unit), finding)
    return sorted(kept.values(), key=lambda finding: finding.order)


def _blamed(findings: Sequence[Corruption], members: Callable[[str], frozenset[int]]) -> list[Corruption]:
    """Blames the owner of a part that several ranks have gathered wrong, since it alone sends the part."""
    gathers = [finding for finding in findings if finding.phase == GATHER]
    others = [finding for finding in findings if finding.phase != GATHER]
    for (unit, owner), several in groupby(sorted(gathers, key=_PART), _PART):
        group = [*several]
        complaining = {finding.rank for finding in group}
        if len(complaining - {owner}) > 1 and complaining >= members(unit) - {owner}:
            told = "All that gathered it have other values than its shard: it was sent wrong"
            others.append(replace(group[0], rank=owner, suspects=(owner,), told=told))
        else:
            others += group
    return sorted(others, key=lambda finding: finding.order)
