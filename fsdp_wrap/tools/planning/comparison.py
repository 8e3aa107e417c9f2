"""Planned figures beside those that a timeline has measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_wrap._core import format_bytes, format_seconds
from fsdp_wrap.tools.planning.figures import UnitPlan
from fsdp_wrap.tools.timeline import Timeline
from fsdp_wrap.tools.timeline.analysis import own_times
from fsdp_wrap.tools.timeline.records import RankRecord


@dataclass(frozen=True)
class ComparedUnit:
    """One unit, planned and measured, in a step.

    Attributes:
        name: Fully qualified name, "" for the root.
        planned_bytes: Bytes of the full buffers that are gathered and reduced for it.
        measured_bytes: The same, measured.
        planned_compute: Seconds in which it computes; None where no time was predicted.
        measured_compute: The same, measured.
        planned_wait: Seconds in which the computation waits for its collectives; None likewise.
        measured_wait: The same, measured.
    """

    name: str
    planned_bytes: int
    measured_bytes: int
    planned_compute: float | None
    measured_compute: float
    planned_wait: float | None
    measured_wait: float


@dataclass(frozen=True)
class Comparison:
    """A plan beside a measurement.

    Attributes:
        steps: How many steps were measured; all figures are of one.
        units: By unit, in the plan's order.
        planned_seconds: Seconds of a step; None where no time was predicted.
        measured_seconds: The same, measured.
    """

    steps: int
    units: tuple[ComparedUnit, ...]
    planned_seconds: float | None
    measured_seconds: float

    def __str__(self) -> str:
        """The table that a person reads: planned left, measured right."""
        planned = format_seconds(self.planned_seconds) or "not predicted"
        measured = format_seconds(self.measured_seconds)
        lines = [f"A step, planned and measured ({self.steps} steps): {planned}, {measured}"]
        lines.append(f"{'Unit':<22}{'travels':^20}{'computes':^19}{'waits':^19}")
        for unit in self.units:
            travels = f"{format_bytes(unit.planned_bytes):>9} {format_bytes(unit.measured_bytes):>9}"
            computes = f"{format_seconds(unit.planned_compute):>9} {format_seconds(unit.measured_compute):>8}"
            waits = f"{format_seconds(unit.planned_wait):>9} {format_seconds(unit.measured_wait):>8}"
            lines.append(f"{(unit.name or '(root)')[-21:]:<22}{travels} {computes} {waits}".rstrip())
        return "\n".join(lines)


def record_of(timeline: Timeline, rank: int, ranks: int) -> RankRecord:
    """Returns the record of a plan's rank.

    Raises:
        ValueError: If there is none, or the timeline is of more ranks than the plan.
    """
    record = next((candidate for candidate in timeline.ranks if candidate.rank == rank), None)
    if record is None:
        there = ", ".join(str(other.rank) for other in timeline.ranks) or "none"
        raise ValueError(f"the plan is of rank {rank}, and the timeline has records of ranks {there}")
    most = max((len(transfer.ranks) for transfer in record.transfers), default=0)
    if most > ranks:
        raise ValueError(f"the plan is of {ranks} ranks, and the timeline of {most} or more")
    return record


def compared(units: Sequence[UnitPlan], planned_seconds: float | None, record: RankRecord) -> Comparison:
    """Returns the units' planned figures beside a rank's record.

    Raises:
        ValueError: If the record is of none of the units.
    """
    computes, nbytes, waits = own_times(record), Counter[str](), Counter[str]()
    gathered = {unit.name: unit.gathered_bytes for unit in units}
    for transfer in record.transfers:
        whole = sum(gathered.get(name, 0) for name in transfer.units) or 1
        nbytes.update({name: transfer.nbytes * gathered.get(name, 0) // whole for name in transfer.units})
        waits.update({wait.unit: wait.end - wait.begin for wait in transfer.waits})
    if nbytes.keys().isdisjoint(gathered):
        names = ", ".join(repr(name) for name in [*nbytes][:3]) or "none"
        raise ValueError(f"the timeline is of other units than the plan's: {names}")
    steps = max(1, len(record.passes))
    rows = tuple(
        ComparedUnit(
            unit.name,
            unit.payload_bytes,
            nbytes[unit.name] // steps,
            unit.compute_seconds,
            computes[unit.name] / steps / 1e9,
            unit.wait_seconds,
            waits[unit.name] / steps / 1e9,
        )
        for unit in units
    )
    begin = record.passes[0] if record.passes else record.begin
    return Comparison(steps, rows, planned_seconds, (record.end - begin) / steps / 1e9)
