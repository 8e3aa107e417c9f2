"""The page of a plan that a person reads: at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_wrap.tools.planning.plan import Plan, UnitPlan

_BAR, _NAME = 24, 24
_MOST_UNITS = 16
"""Lines of the table of units."""


def page_of(plan: Plan) -> str:
    """Returns the page."""
    sections = (_head(plan), _memory(plan), _wire(plan), _time(plan), _units(plan))
    return "\n\n".join("\n".join(section) for section in map(list, sections) if section)


def _head(plan: Plan) -> Iterator[str]:
    yield f"Plan of one step: rank {plan.rank} of {plan.ranks}, on {plan.device}"
    counts = _count(plan.parameters), len(plan.units), _count(plan.flops)
    yield "{} parameters in {} units, {} FLOPs a rank".format(*counts)
    yield ""
    yield f"  at rest  {size(plan.rest_bytes):>9}"
    limit, fits = None if plan.machine is None else plan.machine.device_memory, ""
    if limit is not None:
        fits = f", {'fits' if plan.peak_bytes <= limit else 'does NOT fit'} in {size(limit)}"
    yield f"  peak     {size(plan.peak_bytes):>9}  in {plan.peak_at}{fits}"
    yield f"  peak of the first step {size(plan.first_peak_bytes)}, of setup {size(plan.setup_peak_bytes)}"


def _memory(plan: Plan) -> Iterator[str]:
    yield f"{'Memory':<24}{'at rest':>10}{'at the peak':>13}"
    most = max(plan.peak_bytes, 1)
    kinds = sorted({*plan.rest_by_kind, *plan.peak_by_kind}, key=lambda kind: -plan.peak_by_kind.get(kind, 0))
    for kind in kinds:
        rest, peak = plan.rest_by_kind.get(kind, 0), plan.peak_by_kind.get(kind, 0)
        bar = "#" * round(_BAR * peak / most)
        yield f"  {kind:<22}{size(rest):>10}{size(peak):>13}  {bar}".rstrip()
    host = plan.host
    if plan.device != "cpu" and host.offloaded > 1 << 20:
        held = size(host.offloaded), size(host.pinned), size(host.peak)
        yield "  on the host: {} held ({} pinned), {} at most".format(*held)
    if host.checkpoint:
        yield f"  an asynchronous checkpoint holds {size(host.checkpoint)} of the host's memory meanwhile,"
        yield f"  a full state dict {size(host.loading)}"


def _wire(plan: Plan) -> Iterator[str]:
    yield f"{'Received in a step':<24}{'times':>10}{'bytes':>13}"
    for kind, nbytes in plan.wire_bytes.items():
        yield f"  {kind:<22}{plan.collectives[kind]:>10}{size(nbytes):>13}"
    if not plan.wire_bytes:
        yield "  nothing"


def _time(plan: Plan) -> Iterator[str]:
    if plan.machine is None or plan.predicted_seconds is None:
        yield "No time is predicted: pass machine= (--machine on the command line)"
        return
    yield f"Predicted on {plan.machine.name}"
    yield f"  step {seconds(plan.predicted_seconds)}: computes {seconds(plan.compute_seconds)}, " + (
        f"waits {seconds(plan.exposed_seconds)}"
    )
    yield f"  collectives run for {seconds(plan.communication_seconds)} beside it"


def _units(plan: Plan) -> Iterator[str]:
    timed = plan.predicted_seconds is not None
    yield f"{'Unit':<{_NAME}}{'shard':>10}{'gathered':>10}{'gathers':>9}{'received':>10}" + (
        f"{'computes':>9}{'waits':>8}" if timed else ""
    )
    rows = [(name, _cells(unit, timed)) for name, unit in _alike(plan.units)]
    for name, cells in rows[:_MOST_UNITS]:
        yield f"{_short(name):<{_NAME}}{cells}"
    if len(rows) > _MOST_UNITS:
        yield f"... and {len(rows) - _MOST_UNITS} more lines: see Plan.units"
    most = max(plan.units, key=lambda unit: unit.padding_bytes, default=None)
    if most is not None and most.padding_bytes:
        padding = sum(unit.padding_bytes for unit in plan.units)
        yield f"Aligned shards take {size(padding)} of padding in all ranks together,"
        yield f"most in {most.name or '(root)'}: {size(most.padding_bytes)}"


def _alike(units: Sequence[UnitPlan]) -> Iterable[tuple[str, UnitPlan]]:
    """Joins units that follow each other and are alike."""
    for _, group in groupby(units, key=lambda unit: _cells(unit, unit.compute_seconds is not None)):
        members = [*group]
        first, last = members[0].name or "(root)", members[-1].name
        yield first if len(members) == 1 else f"{first} .. {last.rpartition('.')[2]}", members[0]


def _cells(unit: UnitPlan, timed: bool) -> str:
    received = sum(unit.wire_bytes.values())
    cells = (
        f"{size(unit.shard_bytes):>10}{size(unit.gathered_bytes):>10}{unit.gathers:>9}{size(received):>10}"
    )
    return cells + (f"{seconds(unit.compute_seconds):>9}{seconds(unit.wait_seconds):>8}" if timed else "")


def _short(name: str) -> str:
    return name if len(name) < _NAME else f"..{name[3 - _NAME :]}"


def size(nbytes: int) -> str:
    """Returns bytes as people read them, in units of 1,000."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= least:
            return f"{nbytes / least:.{2 if nbytes < 100 * least else 1}f} {unit}"
    return f"{nbytes} B"


def seconds(value: float | None) -> str:
    """Returns seconds as people read them."""
    if value is None:
        return ""
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if value >= least:
            return f"{value / least:.{2 if value < 10 * least else 1}f} {unit}"
    return f"{value * 1e6:.0f} us"


def _count(number: int) -> str:
    for unit, least in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g} {unit}"
    return str(number)
