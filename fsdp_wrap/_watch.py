"""Waits for collectives, and tells of ranks that do not come.

Where the host waits (gloo), what takes long is reported once, and what cannot complete, or does not shortly
before the group's time limit, ends in an error. Where it does not (NCCL), waiting is an order to a stream:
nothing is noticed here, and the process group alone enforces its limit, without telling where ranks stand.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_wrap._connections import Connections
from fsdp_wrap._device import Issued, Pending
from fsdp_wrap._groups import time_limit
from fsdp_wrap._positions import GroupPositions, positions_of

__all__ = ["Watch", "deaths_told"]

_FIRST_LOOK = timedelta(seconds=0.25)  # beside such a wait, looking costs nothing
_LATER_LOOKS = timedelta(seconds=1.0)
_LAST_LOOK = timedelta(milliseconds=10)  # what rounds to no milliseconds would be no limit
_MARGIN, _LONGEST_MARGIN = 0.2, 30.0  # how long before the limit to give up: a part of it, seconds
_PATIENCE, _LONGEST_PATIENCE = 0.25, 300.0  # how long to say nothing, likewise
_BURIAL = 0.2  # seconds from the end of a killed process's connections to that of its file locks, at most


class Watch:
    """Looks after the ranks of a group while its collectives run.

    Args:
        group: The process group.
        device: Where the buffers live that travel.
        positions: Where the ranks stand.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, positions: GroupPositions) -> None:
        self._group = weakref.ref(group)
        self._device = device
        self.positions = positions

    def issue(self, start: Callable[[], Issued], limited: bool) -> Pending:
        """Issues collectives.

        Waiting raises a `RuntimeError` where one fails or does not complete, or a peer has issued another.

        Args:
            start: Issues them.
            limited: Whether the `wait_for` of what it returns keeps to its limit.

        Raises:
            RuntimeError: If one fails.
        """
        try:
            issued = start()
        except RuntimeError as error:
            raise self.failure(error) from error
        return _LimitedWait(issued, self) if limited else _UnlimitedWait(issued, self)

    def failure(self, error: RuntimeError) -> RuntimeError:
        """Returns what to raise for a failed collective.

        Raises:
            RuntimeError: If a peer had issued another one, which is why it failed.
        """
        time.sleep(_BURIAL)
        self.positions.compare_all()
        told = [f"rank {rank} has ended" for rank in self._ended()]
        text = ": ".join([*(each for each in told if each not in str(error)), str(error)])
        return RuntimeError(f"a collective failed: {text}\n{self.positions.table()}")

    def _ended(self) -> list[int]:
        group = self._group()
        return [] if group is None else Connections(group, self.positions).ended()

    def dead(self) -> list[int]:
        """Returns the ranks of the group that are known to have died."""
        return self.positions.dead_before(sys.maxsize)

    def look(self, number: int, waited: float) -> float:
        """Looks at the ranks; returns the seconds left.

        Args:
            number: Of the collective that is waited for.
            waited: Seconds since it was issued.

        Raises:
            RuntimeError: If it cannot complete, or no time is left.
        """
        self.positions.compare_all()
        for rank in self.positions.dead_before(number):
            raise RuntimeError(f"a collective cannot complete without rank {rank}\n{self.positions.table()}")
        limit = self._limit()
        left = limit - min(_MARGIN * limit, _LONGEST_MARGIN) - waited
        if left <= 0:
            raise RuntimeError(self._report(waited))
        return left

    def warn_if_late(self, waited: float) -> bool:
        """Warns if a collective takes unusually long; returns whether it does."""
        late = waited > min(_PATIENCE * self._limit(), _LONGEST_PATIENCE)
        if late:
            warnings.warn(self._report(waited), stacklevel=2)
        return late

    def _report(self, waited: float) -> str:
        return (
            f"a collective issued {waited:.1f} s ago has not completed; the group's time limit is "
            f"{self._limit():.1f} s\n{self.positions.table()}"
        )

    def _limit(self) -> float:
        return time_limit(self._group(), self._device).total_seconds()


class ComparingWatch(Watch):
    """Lets ranks compare something before the first collective, and then looks after them like another one.

    Args:
        group: The process group.
        device: Where the buffers live that travel.
        positions: Where the ranks stand.
        compare: Called before the first collective; if it raises, again before the next.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        positions: GroupPositions,
        compare: Callable[[], object],
    ) -> None:
        super().__init__(group, device, positions)
        self._compare: Callable[[], object] | None = compare

    def issue(self, start: Callable[[], Issued], limited: bool) -> Pending:
        if self._compare is not None:
            self._compare()
            self._compare = None
        return super().issue(start, limited)


@contextmanager
def deaths_told(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Names the ranks that have died, where that is why what is done inside fails.

    Args:
        group: Of the ranks that communicate; None for the default group.
    """
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


class _Looks:
    """The looks at the ranks during one wait."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._begin = time.monotonic()
        self._number = watch.positions.issued
        self._warned = False

    @property
    def waited(self) -> float:
        """Seconds since the collective was issued."""
        return time.monotonic() - self._begin

    def look(self) -> timedelta:
        """Looks at the ranks and warns once; returns the time left.

        Raises:
            RuntimeError: If the wait is in vain.
        """
        waited = self.waited
        left = self._watch.look(self._number, waited)
        self._warned = self._warned or self._watch.warn_if_late(waited)
        return timedelta(seconds=left)

    def all_came(self) -> bool:
        """Whether all ranks of this host have issued the collective, as far as it has a number.

        Raises:
            RuntimeError: If one has issued another one.
        """
        return self._watch.positions.reached(self._number)


class _LimitedWait:
    """Waits a short time and looks, in turns."""

    def __init__(self, issued: Issued, watch: Watch) -> None:
        self._issued = issued
        self._watch = watch
        self._looks = _Looks(watch)

    def wait(self) -> None:
        pause = _FIRST_LOOK
        while not self._wait_for(pause):
            pause = max(min(2 * pause, _LATER_LOOKS, self._looks.look()), _LAST_LOOK)

    def _wait_for(self, limit: timedelta) -> bool:
        try:
            return self._issued.wait_for(limit)
        except RuntimeError as error:
            raise self._watch.failure(error) from error


class _UnlimitedWait:
    """Waits once all peers have come: nothing could end a wait for one that does not come."""

    def __init__(self, issued: Issued, watch: Watch) -> None:
        self._issued = issued
        self._watch = watch
        self._looks = _Looks(watch)

    def wait(self) -> None:
        if not self._looks.all_came():
            self._await_peers()
        try:
            self._issued.wait()
        except RuntimeError as error:
            raise self._watch.failure(error) from error

    def _await_peers(self) -> None:
        begin = time.monotonic()
        next_look = _FIRST_LOOK.total_seconds()
        while not self._looks.all_came():
            waited = time.monotonic() - begin
            if waited > next_look:
                next_look += min(_LATER_LOOKS, self._looks.look()).total_seconds()
            time.sleep(min(waited / 8, 0.001))  # late by a small part of what the wait takes anyway
