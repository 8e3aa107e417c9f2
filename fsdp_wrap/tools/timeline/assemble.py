"""From a recorder's log to a `RankRecord`: what was issued when, complete when, waited for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fsdp_wrap._core import Computing, Span, SpanKind, encloses
from fsdp_wrap.tools.timeline.recorder import Entry, Lane, Mark, Recorder
from fsdp_wrap.tools.timeline.records import AT_MOST, GATHER, REDUCE, SEEN, TOLD, Level, Slice, Transfer, Wait

BLOCKED_NS = 50_000
"""A wait of so long has seen the end of what it waited for; a shorter one may have come after it."""

_ISSUES = {SpanKind.GATHER: GATHER, SpanKind.REDUCE: REDUCE}
_AWAITED = {SpanKind.AWAIT_GATHER: GATHER, SpanKind.AWAIT_REDUCTION: REDUCE}
_SLICES = {
    SpanKind.AWAIT_GATHER: "wait for gather",
    SpanKind.AWAIT_REDUCTION: "wait for reduction",
    SpanKind.AWAIT_COPIES: "wait for copies",
    SpanKind.UPDATE: "update",
}
OPTIMIZER = "optimizer"


@dataclass
class _Open:
    """A slice that has not ended."""

    what: str
    unit: str
    begin: int
    owner: Any = None
    transfer: int = -1


class Track:
    """Slices that nest: what begins within another ends within it.

    Attributes:
        slices: Those that have ended.
    """

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self._open: list[_Open] = []

    def begin(self, opened: _Open) -> None:
        """Begins one within those that are open."""
        self._open.append(opened)

    def end(self, at: int) -> _Open | None:
        """Ends the innermost one."""
        if not self._open:
            return None
        ended = self._open.pop()
        self.slices.append(Slice(ended.what, ended.unit, ended.begin, max(at, ended.begin), ended.transfer))
        return ended

    def end_until(self, at: int, wanted: Callable[[_Open], bool]) -> bool:
        """Ends the innermost one that is wanted and those within it; returns False if there is none."""
        if not any(map(wanted, self._open)):
            return False
        while not wanted(self._open[-1]):
            self.end(at)
        self.end(at)
        return True

    def end_while(self, at: int, unwanted: Callable[[_Open], bool]) -> None:
        """Ends the innermost ones as long as they are unwanted."""
        while self._open and unwanted(self._open[-1]):
            self.end(at)

    @property
    def depth(self) -> int:
        """How many are open."""
        return len(self._open)

    def closed(self, at: int) -> tuple[Slice, ...]:
        """Ends all, and returns them in the order of their beginnings, the outer ones first."""
        while self._open:
            self.end(at)
        return tuple(sorted(self.slices, key=lambda each: (each.begin, -each.end)))


@dataclass
class _Transfer:
    """A transfer that is being put together."""

    span: Span
    units: tuple[str, ...]
    number: int
    begin: int
    issued: int = 0
    waits: list[Wait] = field(default_factory=list)


class Assembler:
    """Puts one rank's record together.

    Args:
        recorder: That has stopped.
        end: When it did, by the host's clock.
    """

    def __init__(self, recorder: Recorder, end: int) -> None:
        self._recorder, self._end = recorder, end
        self._on_device = recorder.base is not None
        self.track, self.host = Track(), Track()
        self.passes: list[int] = []
        self._transfers: list[_Transfer] = []
        self._numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._of_span: dict[Span, int] = {}
        self._awaited: dict[tuple[str, Any], int] = {}  # by kind and unit: the transfer
        self._levels = _Levels(recorder.names)
        act = {
            Mark.BEGIN: self._begin,
            Mark.END: self._end_span,
            Mark.ENTER: self._enter,
            Mark.LEAVE: self._leave,
            Mark.HOLD: self._hold,
            Mark.OPTIMIZE: self._optimize,
            Mark.OPTIMIZED: self._optimized,
        }
        for entry in recorder.log:
            act[entry.mark](entry)

    def _time(self, entry: Entry) -> int:
        """Returns when the computation came to an entry."""
        return entry.at if entry.event is None else self._recorder.time_of(entry.event)

    def _name(self, owner: Any) -> str:
        return self._recorder.names.get(owner, "?")

    # spans

    def _begin(self, entry: Entry) -> None:
        span = entry.subject
        issued = _ISSUES.get(span.kind)
        if issued is not None:
            self._issue(span, issued, entry)
        elif span.kind in _SLICES:
            unit = self._name(span.owners[0])
            number = self._awaited.get((_AWAITED.get(span.kind, ""), span.owners[0]), -1)
            track = self.host if self._on_device and span.kind is SpanKind.AWAIT_COPIES else self.track
            at = entry.at if track is self.host else self._time(entry)
            track.begin(_Open(_SLICES[span.kind], unit, at, span, number))

    def _issue(self, span: Span, kind: str, entry: Entry) -> None:
        units = tuple(map(self._name, span.owners))
        number = self._numbers[kind, units]
        self._numbers[kind, units] += 1
        index = self._of_span[span] = len(self._transfers)
        self._transfers.append(_Transfer(span, units, number, entry.at))
        for owner in span.owners:
            self._awaited[kind, owner] = index
        track = self.host if self._on_device else self.track
        track.begin(_Open(f"issue {kind}", units[0], entry.at, span, index))

    def _end_span(self, entry: Entry) -> None:
        span = entry.subject
        kind, awaited = _ISSUES.get(span.kind), _AWAITED.get(span.kind)
        on_track = awaited is not None or span.kind is SpanKind.UPDATE
        track = self.host if self._on_device and not on_track else self.track
        at = entry.at if track is self.host else self._time(entry)
        opened = track.end(at) if kind or span.kind in _SLICES else None
        if kind is not None and span in self._of_span:
            self._transfers[self._of_span[span]].issued = entry.at
            if kind == REDUCE:
                self._levels.add_gradients(entry.at, span.owners, span.nbytes)
        elif awaited is not None and opened is not None:
            for owner in span.owners:
                self._awaited.pop((awaited, owner), None)
            if opened.transfer >= 0:
                wait = Wait(opened.unit, opened.begin, at)
                self._transfers[opened.transfer].waits.append(wait)
                if awaited == REDUCE:
                    self._levels.drop_gradients(entry.at, self._transfers[opened.transfer].span.owners)

    # what units compute

    def _enter(self, entry: Entry) -> None:
        at, unit, what = self._time(entry), self._name(entry.subject), entry.detail
        if what is Computing.FORWARD and not self._computes(Computing.FORWARD):
            self.track.end_while(at, lambda _: True)  # whatever a backward has left
            self.passes.append(at)
        elif what is Computing.BACKWARD:
            backward = Computing.BACKWARD.value
            self.track.end_while(at, lambda each: each.what == backward and not encloses(each.unit, unit))
        self.track.begin(_Open(what.value, unit, at, entry.subject))

    def _computes(self, what: Computing) -> bool:
        return any(each.what == what.value for each in self.track._open)

    def _leave(self, entry: Entry) -> None:
        what, owner = entry.detail.value, entry.subject
        self.track.end_until(self._time(entry), lambda each: each.what == what and each.owner is owner)

    def _optimize(self, entry: Entry) -> None:
        at = self._time(entry)
        self.track.end_while(at, lambda each: each.what == Computing.BACKWARD.value)
        self.track.begin(_Open(OPTIMIZER, "", at))

    def _optimized(self, entry: Entry) -> None:
        self.track.end_until(self._time(entry), lambda each: each.what == OPTIMIZER)

    def _hold(self, entry: Entry) -> None:
        self._levels.hold(entry.at, entry.subject, entry.detail)

    # results

    def transfers(self) -> Iterable[Transfer]:
        """Yields the transfers, in the order of their issue."""
        lanes: dict[Span, list[Lane]] = {}
        for lane in self._recorder.lanes:
            if lane.purpose in (GATHER, REDUCE):
                lanes.setdefault(lane.span, []).append(lane)
        for each in self._transfers:
            span, kind = each.span, _ISSUES[each.span.kind]
            begin, issued = each.begin, each.issued or each.begin
            end, known = self._completion(each)
            if self._on_device and span in lanes:
                begin = self._recorder.time_of(lanes[span][0].begin)
                end, known = self._recorder.time_of(lanes[span][-1].end), TOLD
                issued = begin
            dtypes, way, ranks = _travels(span, kind)
            yield Transfer(
                kind,
                each.units,
                each.number,
                span.phase.value if span.phase is not None else "",
                span.nbytes,
                dtypes,
                way,
                ranks,
                begin,
                issued,
                max(end, issued),
                known,
                tuple(each.waits),
            )

    def _completion(self, each: _Transfer) -> tuple[int, str]:
        """Returns when a transfer was complete, and how well that is known."""
        told = self._recorder.completed.get(each.span, [])
        if told and len(told) >= self._recorder.works.get(each.span, -1) > 0:
            return max(told), TOLD
        if not each.waits:
            return self._end, AT_MOST
        first = each.waits[0]
        return first.end, SEEN if first.end - first.begin >= BLOCKED_NS else AT_MOST

    def copies(self) -> Iterable[Slice]:
        """Yields copies between host and device."""
        for span, purpose, begin, end in self._recorder.lanes:
            if purpose not in (GATHER, REDUCE):
                times = self._recorder.time_of(begin), self._recorder.time_of(end)
                yield Slice(purpose, self._name(span.owners[0]), *times, -1, span.nbytes)

    def updates(self) -> Iterable[Slice]:
        """Yields the updates of units beside the backward."""
        for span, begin, end in self._recorder.updates:
            yield Slice(_SLICES[span.kind], self._name(span.owners[0]), begin, end)

    @property
    def levels(self) -> tuple[Level, ...]:
        """What was held."""
        return tuple(self._levels.levels)

    @property
    def peaks(self) -> dict[str, int]:
        """The most bytes of each unit."""
        return self._levels.peaks


class _Levels:
    """What is held: full parameters, and gradients on their way.

    Args:
        names: Of the units.

    Attributes:
        levels: After each change.
        peaks: The most bytes of each unit.
    """

    def __init__(self, names: Any) -> None:
        self._names = names
        self._held: dict[Any, int] = {}
        self._reducing: dict[Any, int] = {}
        self.levels: list[Level] = []
        self.peaks: dict[str, int] = {}

    def hold(self, at: int, owner: Any, nbytes: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + nbytes
        if self._held[owner] <= 0:  # what was held before the recording began is freed
            del self._held[owner]
        self._note(at, [owner])

    def add_gradients(self, at: int, owners: Iterable[Any], nbytes: int) -> None:
        first, *others = owners
        self._reducing[first] = nbytes
        self._reducing.update(dict.fromkeys(others, 0))
        self._note(at, [first, *others])

    def drop_gradients(self, at: int, owners: Iterable[Any]) -> None:
        for owner in owners:
            self._reducing.pop(owner, None)
        self._note(at, [])

    def _note(self, at: int, owners: Iterable[Any]) -> None:
        held = sum(self._held.values())
        self.levels.append(Level(at, held, len(self._held), sum(self._reducing.values())))
        for owner in owners:
            name = self._names[owner]
            nbytes = self._held.get(owner, 0) + self._reducing.get(owner, 0)
            self.peaks[name] = max(self.peaks.get(name, 0), nbytes)


def _travels(span: Span, kind: str) -> tuple[tuple[str, ...], str, tuple[int, ...]]:
    """Returns the dtypes and the way in which something travels, and the ranks between which it does."""
    handle = span.owners[0].handle
    if handle is None:  # its module has gone since
        return (), "", ()
    communicator, reduces = handle.communicator, kind == REDUCE
    members = communicator.members
    ranks = tuple(sorted(members | handle.replicas.members if reduces else members))
    return handle.travelling_dtypes(reduced=reduces), communicator.way, ranks
