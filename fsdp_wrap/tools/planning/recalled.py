"""The last plans of this process: an out-of-memory error tells of the one that fits its units."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from fsdp_wrap._core import format_bytes
from fsdp_wrap._runtime import Unit
from fsdp_wrap.tools.memory import planned_memory
from fsdp_wrap.tools.planning.plan import Plan

_made: deque[Plan] = deque(maxlen=16)


def remember(plan: Plan) -> Plan:
    """Keeps a plan for messages, and returns it."""
    _made.append(plan)
    return plan


@planned_memory.fill
def planned_lines(units: Sequence[Unit]) -> Iterator[str]:
    """Yields the lines of the last plan of such units; none without one."""
    sizes = sorted(gathered_bytes(unit) for unit in units)
    for plan in reversed(_made):
        if sorted(unit.gathered_bytes for unit in plan.units) == sizes:
            rest, peak = format_bytes(plan.rest_bytes), format_bytes(plan.peak_bytes)
            yield f"The plan of them for rank {plan.rank} of {plan.ranks} on {plan.device}:"
            operator = f", in {plan.peak_operator}" if plan.peak_operator else ""
            yield f"  at rest {rest}, peak {peak} in {plan.peak_at}{operator}"
            held = sorted(plan.peak_by_kind.items(), key=lambda kind: -kind[1])
            yield "  " + ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in held if nbytes)
            return


def gathered_bytes(unit: Unit) -> int:
    """Returns the bytes of a unit's full parameters, in the dtype of its computation."""
    return unit.buffers.segments.unsharded_nbytes
