"""Plans made by hand, for tests of what chooses between plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp_wrap.tools.planning import Moment, Place, Plan, UnitPlan


def made_plan(
    moments: Iterable[tuple[str, str, float]],
    seconds: float | None = None,
    first: float = 0,
    units: tuple[UnitPlan, ...] = (),
) -> Plan:
    """Makes a plan that holds so many bytes at places, told by unit and phase; all else is nothing."""
    places = tuple(Moment(Place(key, phase), {"activations": int(n)}) for key, phase, n in moments)
    peak = max(places, key=lambda moment: moment.nbytes)
    zeros: Any = dict.fromkeys(("rank", "parameters", "rest_bytes", "setup_peak_bytes"), 0)
    empty: Any = dict.fromkeys(("rest_by_kind", "wire_bytes", "collectives", "payload_bytes"), {})
    return Plan(
        **zeros,
        **empty,
        ranks=8,
        device="cpu",
        units=units,
        moments=places,
        peak_bytes=peak.nbytes,
        peak_by_kind=peak.bytes_by_kind,
        peak_at=peak.place,
        first_peak_bytes=int(first),
        predicted_seconds=seconds,
    )
