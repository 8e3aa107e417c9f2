"""What was planned beside what a timeline has measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_wrap.tools.planning.page import seconds, size
from fsdp_wrap.tools.timeline import Timeline
from fsdp_wrap.tools.timeline.analysis import own_times

if TYPE_CHECKING:
    from fsdp_wrap.tools.planning.plan import Plan


@dataclass(frozen=True)
class ComparedUnit:
    """One unit, planned and measured, in a step.

    Attributes:
        name: Fully qualified name, "" for the root.
        planned_bytes: Bytes of the full buffers that are gathered and reduced for it.
        measured_bytes: The same as it was.
        planned_compute: Seconds in which it computes; None where no time was predicted.
        measured_compute: The same as it was.
        planned_wait: Seconds in which the computation waits for its collectives; None likewise.
        measured_wait: The same as it was.
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
    """A plan beside what was measured.

    Attributes:
        steps: How many steps were measured; all figures are of one.
        units: By unit, in the plan's order.
        planned_seconds: Of a step; None where no time was predicted.
        measured_seconds: The same as it was.
    """

    steps: int
    units: tuple[ComparedUnit, ...]
    planned_seconds: float | None
    measured_seconds: float

    def __str__(self) -> str:
        """The table that a person reads: planned left, measured right."""
        planned = seconds(self.planned_seconds) or "not predicted"
        lines = [
            f"A step, planned and measured ({self.steps} steps): {planned}, {seconds(self.measured_seconds)}"
        ]
        lines.append(f"{'Unit':<22}{'travels':^20}{'computes':^19}{'waits':^19}")
        for unit in self.units:
            travels = f"{size(unit.planned_bytes):>9} {size(unit.measured_bytes):>9}"
            computes = f"{seconds(unit.planned_compute):>9} {seconds(unit.measured_compute):>8}"
            waits = f"{seconds(unit.planned_wait):>9} {seconds(unit.measured_wait):>8}"
            lines.append(f"{(unit.name or '(root)')[-21:]:<22}{travels} {computes} {waits}".rstrip())
        return "\n".join(lines)


def compared(plan: Plan, timeline: Timeline) -> Comparison:
    """Sets a plan beside what was measured.

    Args:
        plan: It.
        timeline: Of steps like that which was planned.

    Raises:
        ValueError: If it has no record of the plan's rank, or of none of the plan's units.
    """
    record = next((each for each in timeline.ranks if each.rank == plan.rank), None)
    if record is None:
        there = ", ".join(str(each.rank) for each in timeline.ranks) or "none"
        raise ValueError(f"the plan is of rank {plan.rank}, and the timeline has records of ranks {there}")
    sizes = {len(transfer.ranks) for transfer in record.transfers}
    if sizes and max(sizes) > plan.ranks:
        raise ValueError(f"the plan is of {plan.ranks} ranks, and the timeline of {max(sizes)} or more")
    computes, nbytes, waits = own_times(record), Counter[str](), Counter[str]()
    gathered = {unit.name: unit.gathered_bytes for unit in plan.units}
    for transfer in record.transfers:
        whole = sum(gathered.get(name, 0) for name in transfer.units) or 1
        nbytes.update({name: transfer.nbytes * gathered.get(name, 0) // whole for name in transfer.units})
        waits.update({wait.unit: wait.end - wait.begin for wait in transfer.waits})
    if nbytes.keys().isdisjoint(gathered):
        names = ", ".join(repr(name) for name in [*nbytes][:3]) or "none"
        raise ValueError(f"the timeline is of other units than the plan's: {names}")
    steps = max(1, len(record.passes))
    units = tuple(
        ComparedUnit(
            unit.name,
            unit.payload_bytes,
            nbytes[unit.name] // steps,
            unit.compute_seconds,
            computes[unit.name] / steps / 1e9,
            unit.wait_seconds,
            waits[unit.name] / steps / 1e9,
        )
        for unit in plan.units
    )
    begin = record.passes[0] if record.passes else record.begin
    return Comparison(steps, units, plan.predicted_seconds, (record.end - begin) / steps / 1e9)
