"""The figures of a machine, corrected by a timeline of a step that was planned on it."""

from __future__ import annotations

from dataclasses import replace

from fsdp_wrap.tools.planning import Machine, Plan
from fsdp_wrap.tools.timeline import Timeline
from fsdp_wrap.tools.timeline.analysis import Analysis


def correct_machine(plan: Plan, timeline: Timeline) -> Machine:
    """Scales the speeds of a plan's machine so that the plan takes the time that was measured.

    All speeds of the device change by one factor, and those of all links by another: a timeline knows how
    long units compute and transfers run, not which operators and links they wait for. `Machine.source` tells
    the factors.

    Args:
        plan: The plan of the step that was recorded, with a machine.
        timeline: The recording.

    Returns:
        The corrected machine; of one with a range, the middle is corrected.

    Raises:
        ValueError: If the plan has no machine, or the timeline is of other units or ranks than the plan.

    Example:
        ```python
        machine = correct_machine(plan(setup, 64, device="cuda", machine=preset("h100")), load("trace.json"))
        fitted = fit(setup, 64, device="cuda", device_memory="75GB", machine=machine)
        ```
    """
    if plan.machine is None:
        raise ValueError("correct_machine() scales the plan's machine: pass one to plan()")
    machine = plan.machine.expected
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
    changes = _format_change("computation", computes), _format_change("collectives", sends)
    return replace(
        machine,
        name=f"{machine.name}, corrected",
        flops={dtype: flops / computes for dtype, flops in machine.flops.items()},
        memory_bandwidth=machine.memory_bandwidth / computes,
        operator_seconds=machine.operator_seconds * computes,
        bandwidth_within=machine.bandwidth_within / sends,
        bandwidth_between=machine.bandwidth_between / sends,
        latency_within=machine.latency_within * sends,
        latency_between=machine.latency_between * sends,
        source=f"{machine.source}; by a timeline: {', '.join(changes)}",
    )


def _ratio(measured: float, planned: float) -> float:
    """Returns by how much more time was measured than planned; 1 where there is nothing to compare."""
    return measured / planned if measured > 0 and planned > 0 else 1.0


def _format_change(kind: str, ratio: float) -> str:
    slower = f"{ratio:.2f} times slower" if ratio > 1 else f"{1 / ratio:.2f} times faster"
    return f"{kind} {slower}"
