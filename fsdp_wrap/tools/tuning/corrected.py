"""The figures of a machine, corrected by a timeline of a step that was planned on it."""

from __future__ import annotations

from dataclasses import replace

from fsdp_wrap.tools.planning import Machine, Plan
from fsdp_wrap.tools.timeline import Timeline
from fsdp_wrap.tools.timeline.analysis import Analysis

_NOTED = 0.02
"""The least relative change that is told."""


def corrected(machine: Machine, plan: Plan, timeline: Timeline) -> tuple[Machine, list[str]]:
    """Scales a machine's speeds so that the plan takes the time that was measured.

    The middle of a machine's range is scaled: the plan's times are of it.
    All speeds of the device change by one factor, and those of all links by another: a timeline knows how
    long units compute and transfers run, not which operators and links they wait for.

    Args:
        machine: The machine of the plan.
        plan: The plan of the step that was recorded.
        timeline: The recording.

    Returns:
        The corrected machine, and a line for each change.

    Raises:
        ValueError: If the timeline is of other units or ranks than the plan.
    """
    compared = plan.compare(timeline)
    computes = _ratio(
        sum(unit.measured_compute for unit in compared.units),
        sum(unit.planned_compute or 0.0 for unit in compared.units),
    )
    analysis = Analysis(timeline.ranks)
    transfers = [totals for unit in analysis.units.values() for totals in (unit.gathers, unit.reductions)]
    nanoseconds = sum(totals.nanoseconds for totals in transfers)
    sends = _ratio(
        nanoseconds / 1e9 / len(timeline.ranks) / analysis.passes,
        sum(unit.communication_seconds or 0.0 for unit in plan.units),
    )
    machine = machine.expected  # of which the plan's times are
    measured = replace(
        machine,
        name=f"{machine.name}, corrected",
        flops={dtype: flops / computes for dtype, flops in machine.flops.items()},
        memory_bandwidth=machine.memory_bandwidth / computes,
        operator_seconds=machine.operator_seconds * computes,
        bandwidth_within=machine.bandwidth_within / sends,
        bandwidth_between=machine.bandwidth_between / sends,
        latency_within=machine.latency_within * sends,
        latency_between=machine.latency_between * sends,
        source=f"{machine.source}; corrected by a timeline",
    )
    told = [_format_change("computation", computes), _format_change("collectives", sends)]
    return measured, [line for line in told if line]


def _ratio(measured: float, planned: float) -> float:
    """Returns by how much more time was measured than planned; 1 where there is nothing to compare."""
    return measured / planned if measured > 0 and planned > 0 else 1.0


def _format_change(what: str, ratio: float) -> str:
    if abs(ratio - 1) < _NOTED:
        return ""
    slower = f"{ratio:.2f} times slower" if ratio > 1 else f"{1 / ratio:.2f} times faster"
    return f"Corrected by the timeline: {what} {slower} than the machine's figures say"
