"""Plans that were made in this process: an error for lack of memory tells of the one that fits its units."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from fsdp_wrap._runtime import Unit
from fsdp_wrap.tools.memory import planned_memory
from fsdp_wrap.tools.planning.page import size
from fsdp_wrap.tools.planning.plan import Plan

_made: deque[Plan] = deque(maxlen=16)


def remember(plan: Plan) -> Plan:
    """Keeps a plan for messages; only the last are kept."""
    _made.append(plan)
    return plan


@planned_memory.fill
def planned_lines(units: Sequence[Unit]) -> Iterator[str]:
    """Yields what the last plan of such units says; nothing without one."""
    sizes = sorted(gathered_bytes(unit) for unit in units)
    plan = next((each for each in reversed(_made) if _sizes(each) == sizes), None)
    if plan is not None:
        yield f"The plan of them for rank {plan.rank} of {plan.ranks} on {plan.device}:"
        yield f"  at rest {size(plan.rest_bytes)}, peak {size(plan.peak_bytes)} in {plan.peak_at}"
        held = sorted(plan.peak_by_kind.items(), key=lambda kind: -kind[1])
        yield "  " + ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in held if nbytes)


def gathered_bytes(unit: Unit) -> int:
    """Returns the bytes of a unit's full parameters as it computes with them."""
    return 0 if unit.handle is None else unit.handle.unsharded_nbytes


def _sizes(plan: Plan) -> list[int]:
    return sorted(unit.gathered_bytes for unit in plan.units)
