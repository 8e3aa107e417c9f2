"""Watches, from a thread of its own, collectives for which the host does not wait.

On an accelerator waiting is an order to a stream, so nobody notices there that a collective does not
complete. Each lane notes the event behind its work. A thread queries the oldest events about once a second,
and never synchronises. While nothing is pending it sleeps, and it ends with the groups.

It reports before the process group's own watchdog ends the process: in a warning or in the log, and by an
error at the next collective, if the program gets there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from bisect import bisect
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from fsdp_wrap._comm.device import Accelerator
from fsdp_wrap._comm.positions.group import GroupPositions
from fsdp_wrap._comm.positions.host_log import LogEntry
from fsdp_wrap._comm.watching.bulletin import Bulletin, bulletin_of
from fsdp_wrap._comm.watching.watch import Watch, flight_records
from fsdp_wrap._core import warn_caller

_log = logging.getLogger(__name__)

_PACE = 1.0  # seconds between two looks at pending work
_REST = 60.0  # of a thread with nothing pending, until it looks whether other ranks ask for this one
# When to look at the ranks of the host: seconds, at most this part of the limit.
_FIRST_LOOK, _FIRST_PART = 5.0, 0.05
_ASK, _ASK_PART = 30.0, 0.1  # when to ask those of other hosts, likewise
_ASK_PACE, _ASK_PACE_PER_RANK = 5.0, 0.02  # seconds until they are asked again


class _Issued(NamedTuple):
    """Work of a lane, with its event, its time of issue, and this rank's last entry in the group then."""

    event: Any
    since: float
    lane: str
    watch: Watch
    entry: LogEntry

    @property
    def done(self) -> bool:
        """Whether it has completed, or has failed, which others report."""
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True

    def __str__(self) -> str:
        if not self.entry.number:
            return f"on the {self.lane} lane, before any unit's"
        number, what = self.entry.number, self.entry
        return f"on the {self.lane} lane; number {number} of the group, this rank {what}, or what followed"


class Monitor:
    """Watches the lanes of one accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[_Issued] = deque()  # written by all threads, read by ours
        self._pending: dict[str, deque[_Issued]] = {}  # by lane, in the order of completion
        self._watched: dict[GroupPositions, Watch] = {}
        self._reported: dict[GroupPositions, tuple[float, int]] = {}  # time of issue and gravity
        self._asked_at = 0.0
        self._rests = True
        self._wakes: SimpleQueue[None] = SimpleQueue()  # may be written while garbage is collected
        self._thread: threading.Thread | None = None

    def forget_parent(self) -> None:
        """Begins anew in a forked process, which has no thread; the parent's events are left alone."""
        self._of_parent = self._noted, self._pending
        self._reset()

    def note(self, event: Any, lane: str, watch: Watch) -> None:
        """Watches an event that a lane has recorded for a group's work."""
        self._noted.append(_Issued(event, time.monotonic(), lane, watch, watch.positions.latest()))
        if self._rests:
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._rests = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fsdp_wrap watch", daemon=True)
                self._thread.start()
        self._wakes.put(None)

    # in the thread

    def _run(self) -> None:
        accelerator = self._accelerator()
        if accelerator is not None:
            accelerator.prepare_to_ask()
            del accelerator
        while not self._ends():
            self._rests = not any(self._pending.values())
            if self._rests and self._noted:  # `note` appends first, and reads `_rests` then
                self._rests = False
            try:
                self._wakes.get(timeout=_REST if self._rests else _PACE)
            except Empty:
                if self._rests and any(bulletin.asked for bulletin in self._bulletins()):
                    self._pin_up("waits for nothing")
            try:
                self._look()
            except Exception:  # no error here stops training
                _log.exception("cannot look after collectives")

    def _ends(self) -> bool:
        """Whether this thread has nothing left to watch, and never will."""
        for positions in [positions for positions, watch in self._watched.items() if not watch.lives]:
            del self._watched[positions]
            self._reported.pop(positions, None)
        with self._lock:
            self._rests = not any(self._pending.values())  # said before looking, as in `_run`
            ends = self._rests and not (self._watched or self._noted)
            if ends:
                self._thread = None
        return ends

    def _look(self) -> None:
        """Takes over new events, drops completed ones, and checks the oldest of the rest."""
        while self._noted:
            issued = self._noted.popleft()
            self._pending.setdefault(issued.lane, deque()).append(issued)
            if issued.watch.positions not in self._watched:
                self._watched[issued.watch.positions] = issued.watch
                issued.watch.when_gone(self._wakes)
        for lane in self._pending.values():
            _drop_done(lane)
        oldest = [lane[0] for lane in self._pending.values() if lane]
        for positions, (since, _) in list(self._reported.items()):
            if all(issued.since > since for issued in oldest):  # it has completed after all
                del self._reported[positions]
                positions.verdict = None
        if oldest:
            self._see_to(min(oldest, key=lambda issued: issued.since))

    def _see_to(self, issued: _Issued) -> None:
        """Compares, asks, warns or gives up, depending on the age of the oldest collective."""
        watch, waited = issued.watch, time.monotonic() - issued.since
        limit = watch.limit()
        if waited < min(_FIRST_LOOK, _FIRST_PART * limit):
            return
        try:
            watch.positions.compare_all()
            watch.require_living(issued.entry.number)
            others = self._ask(watch, waited) if waited >= min(_ASK, _ASK_PART * limit) else ""
        except RuntimeError as error:
            self._tell(issued, 2, str(error))
            return
        if watch.time_left(waited) <= 0:
            self._tell(issued, 2, f"{watch.report(waited, issued.entry.number, str(issued))}{others}")
        elif watch.is_late(waited):
            self._tell(issued, 1, f"{watch.report(waited, issued.entry.number, str(issued))}{others}")

    def _tell(self, issued: _Issued, gravity: int, text: str) -> None:
        """Reports once that a collective is late, and once that it will not complete.

        `gravity` is 1 if it may still complete, 2 if not: then the next collective raises.
        """
        positions = issued.watch.positions
        since, before = self._reported.get(positions, (0.0, 0))
        if since == issued.since and before >= gravity:
            return
        self._reported[positions] = issued.since, gravity
        text += flight_records()
        if gravity == 2:
            positions.verdict = text
            _log.error(text)
            return
        try:
            warn_caller(text)
        except UserWarning:  # where warnings are errors: there is nobody here to catch one
            _log.warning(text)

    def _ask(self, watch: Watch, waited: float) -> str:
        """Pins up this rank's position for other hosts, and returns theirs.

        Raises a RuntimeError if one has issued another collective in the place of one of ours.
        """
        elsewhere = watch.positions.elsewhere
        if not elsewhere:
            return ""
        now, bulletin = time.monotonic(), bulletin_of(watch.positions)
        if now - self._asked_at > max(_ASK_PACE, _ASK_PACE_PER_RANK * len(elsewhere)):
            self._asked_at = now
            self._pin_up(f"waits since {waited:.0f} s")
            bulletin.ask()
        return bulletin.look(elsewhere)

    def _pin_up(self, state: str) -> None:
        for bulletin in self._bulletins():
            bulletin.pin_up(state)

    def _bulletins(self) -> list[Bulletin]:
        there = [positions for positions, watch in self._watched.items() if watch.lives]
        return [bulletin_of(positions) for positions in there if positions.elsewhere]


def _drop_done(lane: deque[_Issued]) -> None:
    """Drops completed work, all of which precedes the rest: bisection queries few events."""
    done = bisect(lane, False, key=lambda issued: not issued.done) if lane and lane[0].done else 0
    for _ in range(done):
        lane.popleft()
    while lane and not lane[0].watch.lives:
        lane.popleft()


def monitor_of(accelerator: Accelerator) -> Monitor:
    """Returns the one monitor of an accelerator."""
    monitor: Monitor = accelerator.monitor or Monitor(accelerator)
    accelerator.monitor = monitor
    return monitor


_all: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _forget_parent() -> None:
    for monitor in list(_all):
        monitor.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
