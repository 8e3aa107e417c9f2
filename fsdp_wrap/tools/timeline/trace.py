"""Chrome traces of timelines, for Perfetto and chrome://tracing.

A process is a rank. Its tracks are the computation, gathers, reductions, copies, and on an accelerator the
host. Slices of a track nest, so transfers that overlap lie on several numbered tracks. Beside the events the
file holds the records, to merge and report them again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_wrap._core import own_output
from fsdp_wrap.tools.timeline.records import FORMAT, GATHER, REDUCE, RankRecord, Slice, Transfer

_KEY = "fsdp_wrap"
COMPUTE, HOST, COPIES, UPDATES = "compute", "host", "host copies", "host updates"
_FIRST = {COMPUTE: 1, HOST: 2, GATHER: 10, REDUCE: 30, COPIES: 50, UPDATES: 60}
"""The number of each kind's first track."""

TraceEvent = dict[str, Any]


def write(ranks: Sequence[RankRecord], path: str | Path) -> None:
    """Writes records as a trace, compressed if the name ends in ".gz"."""
    begin = min(record.begin + record.offset for record in ranks)
    events = [event for record in ranks for event in _events_of(record, begin)]
    saved = {"format": FORMAT, "ranks": [vars(record) for record in ranks]}
    whole = {"displayTimeUnit": "ms", "traceEvents": events, _KEY: saved}
    # Each of a record's objects is a row of values.
    data = json.dumps(whole, separators=(",", ":"), default=lambda value: [*vars(value).values()]).encode()
    path = own_output(Path(path))
    path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)


def read(path: str | Path) -> list[RankRecord]:
    """Reads the records of a trace.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no trace of a timeline, or one of another version.
    """
    data = Path(path).read_bytes()
    try:
        whole = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        saved = whole[_KEY]
        version, ranks = saved["format"], saved["ranks"]
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a trace that fsdp_wrap.timeline() has written") from error
    if version != FORMAT:
        raise ValueError(
            f"{path} has format {version} of timelines, and this version of fsdp_wrap reads {FORMAT}: record "
            "anew"
        )
    try:
        return [RankRecord.from_json(plain) for plain in ranks]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: a rank's record in it lacks {error}") from error


def _events_of(record: RankRecord, begin: int) -> Iterator[TraceEvent]:
    """Yields the events of one rank; times count from `begin` in the clock of rank 0."""
    tracks = _Tracks(record, record.offset - begin)
    yield from tracks.names()
    on = HOST if record.host_side else COMPUTE
    for name, slices in _slices_of(record).items():
        for slice_ in slices:
            yield tracks.slice(_FIRST[name], slice_)
    for row, number in _rows(record.transfers):
        transfer = record.transfers[number]
        yield tracks.transfer(_FIRST[transfer.kind] + row, transfer)
        yield from tracks.flow(number, _FIRST[transfer.kind] + row, _FIRST[on])
    yield from tracks.counters()


def _slices_of(record: RankRecord) -> dict[str, Sequence[Slice]]:
    return {COMPUTE: record.compute, HOST: record.host_side, COPIES: record.copies, UPDATES: record.updates}


def _rows(transfers: Sequence[Transfer]) -> Iterator[tuple[int, int]]:
    """Yields for each transfer a row where it overlaps no other of its kind, and its index."""
    ends: dict[str, list[int]] = {GATHER: [], REDUCE: []}
    for number in sorted(range(len(transfers)), key=lambda index: transfers[index].begin):
        transfer = transfers[number]
        rows = ends[transfer.kind]
        row = next((row for row, end in enumerate(rows) if end <= transfer.begin), len(rows))
        rows[row:] = [transfer.end, *rows[row + 1 :]]
        yield row, number


class _Tracks:
    """Makes the events of one rank, whose times are shifted by some nanoseconds."""

    def __init__(self, record: RankRecord, shift: int) -> None:
        self._record, self._shift = record, shift
        slices = (*record.host_side, *record.compute)
        self._issues = {issue.transfer: issue for issue in slices if issue.what.startswith("issue")}

    def _at(self, nanoseconds: int) -> float:
        return (nanoseconds + self._shift) / 1000  # microseconds

    def _event(self, kind: str, track: int, name: str, at: int, **more: Any) -> TraceEvent:
        return {"ph": kind, "pid": self._record.rank, "tid": track, "name": name, "ts": self._at(at), **more}

    def names(self) -> Iterator[TraceEvent]:
        """Yields the names of the process and of its tracks."""
        record = self._record
        name = f"rank {record.rank} ({record.device}, {record.host.split(' ')[0]})"
        yield self._meta("process_name", 0, name=name)
        yield self._meta("process_sort_index", 0, sort_index=record.rank)
        used = {kind: int(bool(slices)) for kind, slices in _slices_of(record).items()} | {COMPUTE: 1}
        for row, number in _rows(record.transfers):
            kind = record.transfers[number].kind
            used[kind] = max(used.get(kind, 0), row + 1)
        for kind, rows in used.items():
            for row in range(rows):
                track = _FIRST[kind] + row
                yield self._meta("thread_name", track, name=kind if not row else f"{kind} {row + 1}")
                yield self._meta("thread_sort_index", track, sort_index=track)

    def _meta(self, what: str, track: int, **args: Any) -> TraceEvent:
        return {"ph": "M", "pid": self._record.rank, "tid": track, "name": what, "args": args}

    def slice(self, track: int, slice_: Slice) -> TraceEvent:
        """Returns the event of a slice."""
        name = f"{slice_.what} {slice_.unit}".strip()
        args: dict[str, Any] = {"unit": slice_.unit}
        if slice_.transfer >= 0:
            args["transfer"] = slice_.transfer
        if slice_.nbytes:
            args["bytes"] = slice_.nbytes
        duration = (slice_.end - slice_.begin) / 1000
        return self._event("X", track, name, slice_.begin, dur=duration, cat=slice_.what, args=args)

    def transfer(self, track: int, transfer: Transfer) -> TraceEvent:
        """Returns the event of a transfer."""
        args = {
            "unit": transfer.units[0],
            "units": ", ".join(transfer.units),
            "bytes": transfer.nbytes,
            "dtype": ", ".join(transfer.dtypes),
            "way": transfer.way or "process group",
            "phase": transfer.phase,
            "number": transfer.number,
            "ranks": len(transfer.ranks),
            "end is": transfer.known,
        }
        duration = (transfer.end - transfer.begin) / 1000
        name = f"{transfer.kind} {args['units']}".strip()
        return self._event("X", track, name, transfer.begin, dur=duration, cat=transfer.kind, args=args)

    def flow(self, number: int, track: int, issued_on: int) -> Iterator[TraceEvent]:
        """Yields the arrows from a transfer's issue to it, and on to its first wait."""
        transfer = self._record.transfers[number]
        flow = {"id": (self._record.rank << 24) + number, "cat": "flow", "bp": "e"}
        issue = self._issues.get(number)
        if issue is None or not transfer.waits:
            return
        name = f"{transfer.kind} {transfer.units[0]}".strip()
        yield self._event("s", issued_on, name, issue.begin, **flow)
        yield self._event("t", track, name, max(transfer.begin, issue.begin), **flow)
        yield self._event("f", _FIRST[COMPUTE], name, transfer.waits[0].begin, **flow)

    def counters(self) -> Iterator[TraceEvent]:
        """Yields the counters of memory."""
        for level in self._record.levels:
            yield self._event("C", 0, "unsharded bytes", level.at, args={"bytes": level.unsharded})
            yield self._event("C", 0, "units held", level.at, args={"units": level.units})
            yield self._event("C", 0, "gradients in flight", level.at, args={"bytes": level.gradients})
