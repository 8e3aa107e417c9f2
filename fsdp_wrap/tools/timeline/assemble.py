"""From a recorder's log to a `RankRecord`: each transfer's issue, end and waits, and slices that nest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_wrap._core import Computing, Span, SpanKind, encloses
from fsdp_wrap.tools.timeline.clocks import ClockOffset
from fsdp_wrap.tools.timeline.recorder import RecordKind, StreamRange, TimelineRecord, TimelineRecorder
from fsdp_wrap.tools.timeline.records import (
    AT_MOST,
    GATHER,
    HELP,
    REDUCE,
    SEEN,
    TOLD,
    Level,
    RankRecord,
    Slice,
    Transfer,
    TransferWait,
)

BLOCKED_NS = 50_000
"""A wait of so long ended with its transfer; the transfer of a shorter one may have ended before it."""

_ISSUES = {SpanKind.GATHER: GATHER, SpanKind.REDUCE: REDUCE}
_AWAITED = {SpanKind.AWAIT_GATHER: GATHER, SpanKind.AWAIT_REDUCTION: REDUCE}
_SLICES = {
    SpanKind.AWAIT_GATHER: "wait for gather",
    SpanKind.AWAIT_REDUCTION: "wait for reduction",
    SpanKind.AWAIT_COPIES: "wait for copies",
    SpanKind.UPDATE: "update",
    SpanKind.HELP: HELP,
}
BACKWARD, OPTIMIZER = Computing.BACKWARD.value, "optimizer"


@dataclass
class _OpenSlice:
    """A slice that has not ended; `transfer` is the index of the one that it issues or waits for."""

    what: str
    unit: str
    begin: int
    owner: Any = None
    transfer: int = -1


class Track:
    """Slices that nest: one that begins within another ends within it."""

    def __init__(self) -> None:
        self._ended: list[Slice] = []
        self._open: list[_OpenSlice] = []

    def begin(self, opened: _OpenSlice) -> None:
        """Begins a slice within those that are open."""
        self._open.append(opened)

    def end(self, at: int) -> _OpenSlice | None:
        """Ends the innermost slice, if there is one."""
        if not self._open:
            return None
        ended = self._open.pop()
        self._ended.append(Slice(ended.what, ended.unit, ended.begin, max(at, ended.begin), ended.transfer))
        return ended

    def end_until(self, at: int, wanted: Callable[[_OpenSlice], bool]) -> None:
        """Ends the innermost slice that is wanted, and those within it; none if none is wanted."""
        if any(map(wanted, self._open)):
            self.end_while(at, lambda opened: not wanted(opened))
            self.end(at)

    def end_while(self, at: int, unwanted: Callable[[_OpenSlice], bool]) -> None:
        """Ends the innermost slices as long as they are unwanted."""
        while self._open and unwanted(self._open[-1]):
            self.end(at)

    def has(self, what: str) -> bool:
        """Whether a slice of some kind is open."""
        return any(opened.what == what for opened in self._open)

    def closed(self, at: int) -> tuple[Slice, ...]:
        """Ends all slices, and returns them in the order of their beginnings, outer ones first."""
        self.end_while(at, lambda _: True)
        return tuple(sorted(self._ended, key=lambda ended: (ended.begin, -ended.end)))


@dataclass
class _OpenTransfer:
    """A transfer that is being assembled."""

    span: Span
    units: tuple[str, ...]
    number: int
    begin: int
    issued: int
    waits: list[TransferWait] = field(default_factory=list)


class Assembler:
    """Assembles one rank's record of a recorder that has stopped, at `end` by the host's clock."""

    def __init__(self, recorder: TimelineRecorder, end: int) -> None:
        self._recorder, self._end = recorder, end
        self._on_device = recorder.base is not None
        self.track, self.host = Track(), Track()
        self._passes: list[int] = []
        self._transfers: list[_OpenTransfer] = []
        self._numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._of_span: dict[Span, _OpenTransfer] = {}
        self._awaited: dict[tuple[str, Any], int] = {}  # index of the transfer by kind and unit
        self._levels = _Levels(recorder.names)
        act = {
            RecordKind.BEGIN: self._begin,
            RecordKind.END: self._end_span,
            RecordKind.ENTER: self._enter,
            RecordKind.LEAVE: self._leave,
            RecordKind.HOLD: self._hold,
            RecordKind.OPTIMIZE: self._optimize,
            RecordKind.OPTIMIZED: self._optimized,
        }
        for entry in recorder.log:
            act[entry.kind](entry)

    def record(self, rank: int, device: str, clock: ClockOffset, begin: int) -> RankRecord:
        """Returns the record of a recording that began at `begin`."""
        return RankRecord(
            rank=rank,
            host=clock.host,
            device=device,
            offset=clock.offset,
            clock_error=clock.error,
            begin=begin,
            end=self._end,
            passes=tuple(self._passes),
            compute=self.track.closed(self._end),
            host_side=self.host.closed(self._end),
            copies=tuple(self._copies()),
            transfers=tuple(self._closed_transfers()),
            levels=tuple(self._levels.levels),
            peaks=self._levels.peaks,
            updates=tuple(
                Slice(_SLICES[span.kind], self._name(span.owners[0]), begin, end)
                for span, begin, end in self._recorder.updates
            ),
        )

    def _time(self, entry: TimelineRecord) -> int:
        """Returns when the computation came to an entry."""
        return entry.at if entry.event is None else self._recorder.time_of(entry.event)

    def _name(self, owner: Any) -> str:
        return self._recorder.names.get(owner, "?")

    # spans

    def _begin(self, entry: TimelineRecord) -> None:
        span = entry.subject
        if span.kind in _ISSUES:
            self._issue(span, _ISSUES[span.kind], entry.at)
        elif span.kind in _SLICES:
            index = self._awaited.get((_AWAITED.get(span.kind, ""), span.owners[0]), -1)
            track = self.host if self._on_device and span.kind is SpanKind.AWAIT_COPIES else self.track
            at = entry.at if track is self.host else self._time(entry)
            if span.kind is SpanKind.HELP:
                self._begin_pass(at)
            track.begin(_OpenSlice(_SLICES[span.kind], self._name(span.owners[0]), at, span, index))

    def _issue(self, span: Span, kind: str, at: int) -> None:
        units = tuple(map(self._name, span.owners))
        index = len(self._transfers)
        transfer = self._of_span[span] = _OpenTransfer(span, units, self._numbers[kind, units], at, at)
        self._transfers.append(transfer)
        self._numbers[kind, units] += 1
        self._awaited.update({(kind, owner): index for owner in span.owners})
        track = self.host if self._on_device else self.track
        track.begin(_OpenSlice(f"issue {kind}", units[0], at, span, index))

    def _end_span(self, entry: TimelineRecord) -> None:
        span = entry.subject
        kind, awaited = _ISSUES.get(span.kind), _AWAITED.get(span.kind)
        on_host = kind is not None or span.kind is SpanKind.AWAIT_COPIES
        track = self.host if self._on_device and on_host else self.track
        at = entry.at if track is self.host else self._time(entry)
        opened = track.end(at) if kind or span.kind in _SLICES else None
        if kind is not None and span in self._of_span:
            self._of_span[span].issued = entry.at
            if kind == REDUCE:
                self._levels.add_gradients(entry.at, span.owners, span.nbytes)
        elif awaited is not None and opened is not None:
            for owner in span.owners:
                self._awaited.pop((awaited, owner), None)
            if opened.transfer >= 0:
                transfer = self._transfers[opened.transfer]
                transfer.waits.append(TransferWait(opened.unit, opened.begin, at))
                if awaited == REDUCE:
                    self._levels.drop_gradients(entry.at, transfer.span.owners)

    # computation

    def _enter(self, entry: TimelineRecord) -> None:
        at, unit, what = self._time(entry), self._name(entry.subject), entry.detail
        if what is Computing.FORWARD and not self.track.has(what.value):
            self._begin_pass(at)
        elif what is Computing.BACKWARD:
            self.track.end_while(
                at, lambda opened: opened.what == BACKWARD and not encloses(opened.unit, unit)
            )
        self.track.begin(_OpenSlice(what.value, unit, at, entry.subject))

    def _begin_pass(self, at: int) -> None:
        self.track.end_while(at, lambda _: True)  # rests of a backward
        self._passes.append(at)

    def _leave(self, entry: TimelineRecord) -> None:
        what, owner = entry.detail.value, entry.subject
        self.track.end_until(self._time(entry), lambda opened: opened.what == what and opened.owner is owner)

    def _optimize(self, entry: TimelineRecord) -> None:
        at = self._time(entry)
        self.track.end_while(at, lambda opened: opened.what == BACKWARD)
        self.track.begin(_OpenSlice(OPTIMIZER, "", at))

    def _optimized(self, entry: TimelineRecord) -> None:
        self.track.end_until(self._time(entry), lambda opened: opened.what == OPTIMIZER)

    def _hold(self, entry: TimelineRecord) -> None:
        self._levels.hold(entry.at, entry.subject, entry.detail)

    # transfers and copies

    def _closed_transfers(self) -> Iterator[Transfer]:
        """Yields the transfers in the order of their issue."""
        ranges: dict[Span, list[StreamRange]] = {}
        for stream_range in self._recorder.stream_ranges:
            if stream_range.purpose in (GATHER, REDUCE):
                ranges.setdefault(stream_range.span, []).append(stream_range)
        for transfer in self._transfers:
            span, kind = transfer.span, _ISSUES[transfer.span.kind]
            begin, issued = transfer.begin, transfer.issued
            end, known = self._completion(transfer)
            if self._on_device and span in ranges:
                begin = issued = self._recorder.time_of(ranges[span][0].begin)
                end, known = self._recorder.time_of(ranges[span][-1].end), TOLD
            dtypes, way, ranks = _communication(span, kind)
            yield Transfer(
                kind=kind,
                units=transfer.units,
                number=transfer.number,
                phase=span.phase.value if span.phase is not None else "",
                nbytes=span.nbytes,
                dtypes=dtypes,
                way=way,
                ranks=ranks,
                begin=begin,
                issued=issued,
                end=max(end, issued),
                known=known,
                waits=tuple(transfer.waits),
            )

    def _completion(self, transfer: _OpenTransfer) -> tuple[int, str]:
        """Returns when a transfer was complete, and how well that is known."""
        completed = self._recorder.completed.get(transfer.span, [])
        if completed and len(completed) >= self._recorder.works.get(transfer.span, -1) > 0:
            return max(completed), TOLD
        if not transfer.waits:
            return self._end, AT_MOST
        first = transfer.waits[0]
        return first.end, SEEN if first.end - first.begin >= BLOCKED_NS else AT_MOST

    def _copies(self) -> Iterator[Slice]:
        """Yields copies between host and device."""
        for span, purpose, begin, end in self._recorder.stream_ranges:
            if purpose not in (GATHER, REDUCE):
                times = self._recorder.time_of(begin), self._recorder.time_of(end)
                yield Slice(purpose, self._name(span.owners[0]), *times, -1, span.nbytes)


class _Levels:
    """Bytes of full parameters and reduced gradients: after each change, and the peak of each unit."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self._names = names
        self._held: dict[Any, int] = {}
        self._reducing: dict[Any, int] = {}
        self.levels: list[Level] = []
        self.peaks: dict[str, int] = {}

    def hold(self, at: int, owner: Any, nbytes: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + nbytes
        if self._held[owner] <= 0:  # it was gathered before the recording began
            del self._held[owner]
        self._note(at, [owner])

    def add_gradients(self, at: int, owners: Iterable[Any], nbytes: int) -> None:
        first, *others = owners
        self._reducing |= {first: nbytes, **dict.fromkeys(others, 0)}
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


def _communication(span: Span, kind: str) -> tuple[tuple[str, ...], str, tuple[int, ...]]:
    """Returns the dtypes of a transfer, the way that it takes, and its ranks."""
    buffers = span.owners[0].buffers
    if not buffers.params:  # the module was freed since
        return (), "", ()
    communicator, reduces = buffers.communicator, kind == REDUCE
    members = communicator.members
    ranks = tuple(sorted(members | buffers.replicas.members if reduces else members))
    nbytes = (buffers.gradients if reduces else buffers.segments).nbytes_by_dtype()
    return tuple(nbytes), communicator.way, ranks
