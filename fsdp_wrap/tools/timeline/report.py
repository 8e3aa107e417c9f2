"""The report of a timeline: a table by unit, and advice for units that wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from fsdp_wrap._core import format_bytes
from fsdp_wrap.tools.timeline.analysis import Analysis, SplitWait, UnitTimes
from fsdp_wrap.tools.timeline.records import GATHER, RankRecord

ROOT = "(root)"
WORTH_NS, WORTH = 50_000, 0.01
"""The least wait in a pass that is worth advice: nanoseconds, and a part of the pass."""
_SOON = 0.2
"""A gather was issued too late if it came before its wait by less than this part of the wait."""

_COLUMNS = ("unit", "gather", "reduce", "issue", "wait", "late", "transfer", "GB/s", "peak MB", "last rank")


def report_lines(ranks: Sequence[RankRecord]) -> Iterator[str]:
    """Yields the report's lines."""
    analysis = Analysis(ranks)
    yield from _head(analysis, ranks)
    yield ""
    yield from _aligned([_COLUMNS, *(_row(unit, analysis, len(ranks)) for unit in analysis.units.values())])
    yield ""
    yield "Times are milliseconds of one pass (forward and backward), the average of the ranks."
    advice = [*_advice(analysis, len(ranks))]
    if advice:
        yield ""
        yield from advice


def _head(analysis: Analysis, ranks: Sequence[RankRecord]) -> Iterator[str]:
    passes, waits = analysis.passes * len(ranks), [*analysis.waits]
    waited = sum(wait.total for wait in waits) / passes
    late = sum(wait.late for wait in waits) / passes
    hosts = len({record.host for record in ranks})
    on = f"{_plural(len(ranks), 'rank')} on {'one host' if hosts == 1 else f'{hosts} hosts'}"
    yield f"{on}, {_plural(analysis.passes, 'pass', 'passes')} of {_ms(analysis.pass_ns)} ms"
    share = waited / analysis.pass_ns if analysis.pass_ns else 0.0
    yield (
        f"The computation waits {_ms(waited)} ms of a pass ({share:.0%}): {_ms(late)} ms for late ranks, "
        f"{_ms(waited - late)} ms for transfers."
    )
    yield from _updates(analysis, passes)
    yield from _helping(analysis)
    yield from _late_rank(analysis, waits, len(ranks))
    error = max(record.clock_error for record in ranks)
    if error:
        yield f"The clocks of the hosts are compared to {_ms(error)} ms."
    if not all(joint.complete for joint in analysis.joint):
        yield "Some ranks' records are missing: waits for those ranks count as transfers. Merge all files."


def _updates(analysis: Analysis, passes: int) -> Iterator[str]:
    """Yields the line about updates in threads of the host, if there were any."""
    whole, beside = analysis.updates
    if whole:
        yield (
            f"The host updates units for {_ms(whole / passes)} ms of a pass in a thread of its own, "
            f"{beside / whole:.0%} of that beside the backward of others."
        )


def _helping(analysis: Analysis) -> Iterator[str]:
    """Yields the line about ranks without a batch, if there were any."""
    times = {
        rank: sum(slice_.end - slice_.begin for slice_ in helped) for rank, helped in analysis.helping.items()
    }
    rank = max(times, key=times.__getitem__)
    if times[rank]:
        most = f"{_ms(times[rank])} ms on rank {rank}"
        yield f"Helping other ranks, without a batch, takes {_ms(sum(times.values()))} ms in all: {most}."


def _late_rank(analysis: Analysis, waits: Iterable[SplitWait], ranks: int) -> Iterator[str]:
    """Yields the line about the rank that the others wait for most, if it is worth one."""
    held_up = _late_by_rank(waits)
    if ranks == 1 or not held_up:
        return
    rank, total = held_up.most_common(1)[0]
    delay = total / analysis.passes / (ranks - 1)
    if delay < _least(analysis):
        return
    unit, slower = analysis.slower_in(rank)
    where = "outside of the units" if unit is None else f"in `{unit or ROOT}`"
    because = f": it computes {_ms(slower)} ms longer than they do {where}" if slower > delay / 4 else ""
    yield f"Rank {rank} holds up the others, each by {_ms(delay)} ms of a pass{because}."


def _late_by_rank(waits: Iterable[SplitWait]) -> Counter[int]:
    """Returns the nanoseconds that were waited for each rank that came last."""
    late = Counter[int]()
    for wait in waits:
        late[wait.last] += wait.late
    return late


def _least(analysis: Analysis) -> float:
    """Returns the nanoseconds of a pass that are worth a sentence."""
    return max(WORTH_NS, WORTH * analysis.pass_ns)


def _row(unit: UnitTimes, analysis: Analysis, ranks: int) -> tuple[str, ...]:
    passes = analysis.passes * ranks
    late = sum(wait.late for wait in unit.waits) / passes
    transfer = sum(wait.transfer for wait in unit.waits) / passes
    issuing = (unit.gathers.issuing + unit.reductions.issuing) / passes
    nanoseconds = unit.gathers.nanoseconds + unit.reductions.nanoseconds
    nbytes = unit.gathers.nbytes + unit.reductions.nbytes
    bounded = unit.gathers.bounded or unit.reductions.bounded
    rate = f"{'>=' if bounded else ''}{nbytes / nanoseconds:.3g}" if nanoseconds and nbytes else "-"
    return (
        unit.unit or ROOT,
        _ms(unit.gathers.nanoseconds / passes),
        _ms(unit.reductions.nanoseconds / passes),
        _ms(issuing),
        _ms(late + transfer),
        _ms(late),
        _ms(transfer),
        rate,
        f"{unit.peak / 1e6:.2f}",
        _last(unit),
    )


def _last(unit: UnitTimes) -> str:
    if not unit.lasts:
        return "-"
    rank, times = unit.lasts.most_common(1)[0]
    return f"{rank} ({times} of {unit.transfers}, {_ms(unit.lateness[rank] / times)} ms)"


def _aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
        yield "  ".join(cells).rstrip()


# advice


def _advice(analysis: Analysis, ranks: int) -> Iterator[str]:
    """Yields a sentence for each unit whose wait is worth it, the longest first."""
    passes = analysis.passes * ranks
    least = _least(analysis)
    due = []
    for unit in analysis.units.values():
        by_place: dict[tuple[str, str], list[SplitWait]] = defaultdict(list)
        for wait in unit.waits:
            by_place[wait.kind, wait.phase].append(wait)
        worst = max(by_place.values(), key=_total, default=[])
        if _total(worst) / passes >= least:
            due.append((_total(worst), _sentence(unit, worst, passes)))
    yield from (sentence for _, sentence in sorted(due, reverse=True))


def _total(waits: Iterable[SplitWait]) -> int:
    return sum(wait.total for wait in waits)


def _sentence(unit: UnitTimes, waits: Sequence[SplitWait], passes: int) -> str:
    name, wait = f"`{unit.unit}`" if unit.unit else "The root", waits[0]
    total, late = _total(waits), sum(split.late for split in waits)
    gathers = wait.kind == GATHER
    what = f"{name} waits {_ms(total / passes)} ms for its {'gather' if gathers else 'reduction'}"
    if 2 * late >= total:
        rank = _late_by_rank(waits).most_common(1)[0][0]
        return (
            f"{what}, {late / total:.0%} of it for rank {rank}, which comes last: give that rank less to do."
        )
    totals = unit.gathers if gathers else unit.reductions
    rate = f"{format_bytes(totals.bandwidth)}/s"
    fewer = "a param dtype of 16 bits, SHARD_GRAD_OP" if gathers else "a reduce dtype of 16 bits, no_sync"
    if wait.way.startswith("shared memory"):
        return f"{what}, which it copies from shared memory at {rate}: send fewer bytes ({fewer})."
    if gathers and sum(split.head for split in waits) < _SOON * total:
        how = "forward_prefetch=True" if wait.phase == "forward" else "backward_prefetch"
        call = f"set_modules_to_{'forward' if wait.phase == 'forward' else 'backward'}_prefetch"
        return f"{what}, which is issued only when it is needed: prefetch it ({how}, or {call})."
    if gathers:
        return (
            f"{what}, though that was prefetched: at {rate} it takes longer than what is computed meanwhile; "
            f"send fewer bytes ({fewer}) or compute more in a pass."
        )
    return f"{what} at {rate}: send fewer bytes ({fewer})."


def _ms(nanoseconds: float) -> str:
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.1f}" if milliseconds >= 1 else f"{milliseconds:.2f}"


def _plural(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
