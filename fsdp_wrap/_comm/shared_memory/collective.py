"""Waits of a rank that shares memory: for posts of the others, and for room to post more."""

from __future__ import annotations

import time
from collections.abc import Callable

from fsdp_wrap._comm.shared_memory.channel import Channel
from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._comm.works import InFlight

_PAUSE = 0.001  # seconds between looks for room


class PostedCollective(InFlight):
    """A collective that this rank has posted; `take` is called with its number when all others have."""

    def __init__(self, watch: Watch, channel: Channel, number: int, take: Callable[[int], object]) -> None:
        super().__init__(watch)
        self._channel, self._posted, self._take = channel, number, take

    def _wait_for(self, seconds: float) -> bool:
        if not self._posted:
            raise RuntimeError(
                "an earlier wait was interrupted while this rank took what the others posted, so what it has "
                "is incomplete: run the step anew"
            )
        if not self._channel.arrived(self._posted, seconds):
            return False
        try:
            self._take(self._posted)
        finally:
            self._channel.release(self._posted)
            self._posted = 0
        return True

    def __del__(self) -> None:
        if self._posted:  # the wait was given up: the peers' memory is free again
            self._channel.release(self._posted)


class Room(InFlight):
    """Room for so many more collectives."""

    def __init__(self, watch: Watch, channel: Channel, more: int) -> None:
        super().__init__(watch)
        self._channel, self._more = channel, more

    def _wait_for(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._channel.has_room(self._more):
            if time.monotonic() - begin > seconds:
                return False
            time.sleep(_PAUSE)
        return True
