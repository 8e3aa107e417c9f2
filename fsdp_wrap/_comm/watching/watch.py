"""Waits for collectives, and reports ranks that do not come.

Where the host waits (gloo), a long wait is reported once, and one that is in vain, or lasts until shortly
before the group's time limit, ends in an error. Where it does not (NCCL), waiting is an order to a stream,
and `_comm/watching/monitor.py` looks from a thread of its own.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.groups import time_limit
from fsdp_wrap._comm.positions import GroupPositions, positions_of
from fsdp_wrap._core import warn_caller
from fsdp_wrap._core.torch_private import dump_flight_records, groups_alive

_FIRST_LOOK = 0.25  # seconds; beside such a wait, looking costs nothing
_FIRST_LIMIT = timedelta(seconds=_FIRST_LOOK)
_LATER_LOOKS = 1.0
_LAST_LOOK = 0.01  # rounded to no milliseconds it would be no limit
_MARGIN, _LONGEST_MARGIN = 0.2, 30.0  # how long before the limit to give up: a part of it, seconds
_PATIENCE, _LONGEST_PATIENCE = 0.25, 300.0  # how long to say nothing, likewise
_TAG = 0x66736474  # of messages that nobody waits for; no user is likely to choose it
_MOST_RECORDS = 4  # of torch's flight recorder
_BURIAL = 0.2  # seconds from the end of a killed process's connections to that of its file locks, at most


class Watch:
    """Looks after the ranks of a group while its collectives run."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, positions: GroupPositions) -> None:
        self._group = weakref.ref(group)
        self._device = device
        self.positions = positions
        self._registry = id(groups_alive().pg_map)  # of this thread, where ranks are threads

    @property
    def lives(self) -> bool:
        """Whether the group was not destroyed, as far as the calling thread can know."""
        group, groups = self._group(), groups_alive().pg_map
        return group is not None and (group in groups or id(groups) != self._registry)

    def when_gone(self, wakes: SimpleQueue[None]) -> None:
        """Puts something into a queue when the group has gone."""
        group = self._group()
        if group is not None:
            weakref.finalize(group, wakes.put, None).atexit = False

    def failure(self, error: RuntimeError) -> RuntimeError:
        """Returns the error for a failed collective.

        Raises a RuntimeError if a peer had issued another one, which is why it failed.
        """
        time.sleep(_BURIAL)
        self.positions.compare_all()
        group = self._group()
        members = [] if group is None else dist.get_process_group_ranks(group)
        ended = [
            f"rank {member} has ended"
            for rank, member in enumerate(members)
            if member != self.positions.member and self.has_ended(rank)
        ]
        text = ": ".join([*(each for each in ended if each not in str(error)), str(error)])
        return RuntimeError(f"a collective failed: {text}\n{self.positions.table()}")

    def has_ended(self, rank: int) -> bool:
        """Whether another rank of the group has ended, as far as can be known.

        A process that ends closes its connections, also if it has never used this library.
        """
        group = self._group()
        if group is None:
            return False
        member = dist.get_global_rank(group, rank)
        if self.positions.knows(member):
            return not self.positions.lives(member)
        return _is_closed(group, rank)

    def dead(self) -> list[int]:
        """Returns the ranks of the group that are known to have died."""
        return self.positions.dead_before(sys.maxsize)

    def require_living(self, number: int) -> None:
        """Raises a RuntimeError if a rank died before it came to a collective."""
        for rank in self.positions.dead_before(number):
            raise RuntimeError(f"a collective cannot complete without rank {rank}\n{self.positions.table()}")

    def time_left(self, waited: float) -> float:
        """Returns the seconds left to wait for a collective after a wait of some seconds."""
        limit = self.limit()
        return limit - min(_MARGIN * limit, _LONGEST_MARGIN) - waited

    def is_late(self, waited: float) -> bool:
        """Whether a collective takes unusually long, after a wait of some seconds."""
        return waited > min(_PATIENCE * self.limit(), _LONGEST_PATIENCE)

    def report(self, waited: float, what: str = "") -> str:
        """Describes a collective that takes long, after a wait of some seconds, with all positions."""
        named = f" ({what})" if what else ""
        return (
            f"a collective issued {waited:.1f} s ago has not completed{named}; the group's time limit is "
            f"{self.limit():.1f} s\n{self.positions.table()}"
        )

    def limit(self) -> float:
        """Returns the time limit of the group's collectives in seconds."""
        return time_limit(self._group(), self._device).total_seconds()


@contextmanager
def deaths_told(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Adds the ranks that have died to errors of communication inside; None for the default group."""
    try:
        yield
    except RuntimeError as error:
        group = group or (dist.group.WORLD if dist.is_available() else None)
        if group is None:
            raise
        watch = Watch(group, torch.device("cpu"), positions_of(group))
        time.sleep(_BURIAL)
        watch.positions.table()  # which looks for the ranks
        if not watch.dead():
            raise
        raise watch.failure(error) from error


class InFlight(ABC):
    """Something of a group's that was issued just now."""

    def __init__(self, watch: Watch, works: Sequence[Any] = ()) -> None:
        self._watch, self._works = watch, works
        self._number = watch.positions.issued
        self._begin = time.monotonic()
        self._ended, self._warned = False, False
        self._failure: str | None = None  # not the error, which would hold the frames of its waiter

    @abstractmethod
    def _wait_for(self, seconds: float) -> bool:
        """Waits some seconds at most; returns whether it has ended. Called until it has, or has failed."""

    def wait(self, pause: float = _FIRST_LOOK) -> None:
        """Waits until it has ended, with a first look at the ranks after `pause` seconds.

        Raises a RuntimeError if it has failed, or does not end, or a peer has issued something else.
        """
        while not self._ended:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            try:
                self._ended = self._wait_for(pause)
            except RuntimeError as error:
                self._failure = str(error)
                failure = self._watch.failure(error)  # or raises: peers issued something else
                self._failure = str(failure)
                raise failure from error
            if not self._ended:
                pause = min(max(2 * pause, 2 * _FIRST_LOOK), _LATER_LOOKS)
                pause = max(min(pause, self._look()), _LAST_LOOK)

    def _look(self) -> float:
        """Looks at the ranks and warns once; returns the seconds left, or raises a RuntimeError."""
        watch, waited = self._watch, time.monotonic() - self._begin
        watch.positions.compare_all()
        watch.require_living(self._number)
        left = watch.time_left(waited)
        if left <= 0:
            raise RuntimeError(watch.report(waited))
        if not self._warned and watch.is_late(waited):
            warn_caller(watch.report(waited))
            self._warned = True
        return left


class Works(InFlight):
    """Works of the process group."""

    def wait(self, pause: float = _LAST_LOOK) -> None:
        try:
            for work in self._works:
                work.wait(_FIRST_LIMIT)
        except RuntimeError:  # one is late, or has failed
            super().wait(pause)

    def _wait_for(self, seconds: float) -> bool:
        limit = timedelta(seconds=seconds)
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError:
                if not work.is_completed():  # it goes on: only the waiting has ended
                    return False
                work.wait()  # raises its error, or has succeeded just after the limit
        return True


class WorksWithoutLimit(InFlight):
    """Works to wait for once all peers have come: nothing could end a wait for a missing one."""

    def _wait_for(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._watch.positions.reached(self._number):
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            time.sleep(min(waited / 8, 0.001))  # late by a small part of the whole wait
        for work in self._works:
            work.wait()
        return True


def _is_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the connection to a rank is closed: then gloo refuses to send."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none sends from there
        return False
    is_gloo = dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)
    if not is_gloo:
        return False
    try:
        backend.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, _TAG)
    except RuntimeError:
        return True
    return False


def flight_records() -> str:
    """Describes the collectives that torch's flight recorder has not seen complete, a line each; else "".

    The recorder runs where torch is told so, mostly by TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE.
    """
    try:
        entries = json.loads(dump_flight_records(True, True)).get("entries", [])
    except (RuntimeError, TypeError, ValueError):  # a build without one, or one of another form
        return ""
    active = [each for each in entries if each.get("state") != "completed" and not each.get("retired")]
    if not active:
        return ""
    lines = ["Torch's flight recorder has not seen complete:", *map(_record, active[:_MOST_RECORDS])]
    if len(active) > _MOST_RECORDS:
        lines.append(f"  {len(active) - _MOST_RECORDS} more")
    return "".join(f"\n{line}" for line in lines)


def _record(entry: dict[str, Any]) -> str:
    group = " ".join(map(str, entry.get("process_group", ["?"])))
    number, sizes = entry.get("collective_seq_id", "?"), entry.get("input_sizes", "?")
    return (
        f"  {entry.get('profiling_name', '?')} of {sizes}, number {number} of group {group}: "
        f"{entry.get('state', '?')}"
    )
