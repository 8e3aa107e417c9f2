"""`Stage`: a communicator of one stage, and the second stages that wait to be issued there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_wrap._comm import Communicator, Pending


class Stage:
    """A communicator whose collectives are issued in one order on all ranks, whatever they wait for.

    On the CPU a second stage is issued when somebody waits for it. Ranks may wait in different orders, so
    those queued come before all that is issued later.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        group = communicator.group
        self._queued = deque[_Queued]() if group is None else _queues.setdefault(group, deque())

    def queue(self, first: Pending, issue: Callable[[], Pending]) -> Pending:
        """Queues collectives that `issue` issues once `first` was waited for."""
        queued = _Queued(self, first, issue)
        self._queued.append(queued)
        return queued

    def finish_earlier(self, last: _Queued | None = None) -> None:
        """Issues what is queued: all, or up to the `last`."""
        while self._queued and (last is None or last.second is None):
            self._queued[0].issue()
            self._queued.popleft()  # now that it has not failed


class _Queued:
    """A collective in two stages, whose first was issued."""

    def __init__(self, stage: Stage, first: Pending, issue: Callable[[], Pending]) -> None:
        self._stage, self._first, self._issue = stage, first, issue
        self.second: Pending | None = None

    def issue(self) -> None:
        """Issues the second stage after the first."""
        self._first.wait()
        self.second = self._issue()

    def wait(self) -> None:
        self._stage.finish_earlier(self)
        assert self.second is not None
        self.second.wait()


_queues: WeakKeyDictionary[dist.ProcessGroup, deque[_Queued]] = WeakKeyDictionary()
"""By group, since units share it."""
