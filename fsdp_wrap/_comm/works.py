"""Works in flight: waiting for them with an eye on the ranks of the group, and on its time limit."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._core import warn_caller

_FIRST_LOOK = 0.25  # seconds; beside such a wait, looking costs nothing
_FIRST_LIMIT = timedelta(seconds=_FIRST_LOOK)
_LATER_LOOKS = 1.0
_LAST_LOOK = 0.01  # rounded to no milliseconds it would be no limit


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
                try:
                    raise self._watch.failure(error) from error  # or that raises: peers issued another one
                except RuntimeError as told:
                    self._failure = str(told)  # for what waits again when the error passes through it
                    raise
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
            raise RuntimeError(watch.report(waited, self._number))
        if not self._warned and watch.is_late(waited):
            warn_caller(watch.report(waited, self._number))
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
