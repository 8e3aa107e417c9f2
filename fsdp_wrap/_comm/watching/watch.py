"""Looks after the ranks of a group while collectives run, and reports those that do not come.

Where the host waits (gloo), a long wait is reported once, and one that is in vain, or lasts until shortly
before the group's time limit, ends in an error. Where it does not (NCCL), waiting is an order to a stream,
and `_comm/watching/monitor.py` looks from a thread of its own.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.calls import tell_call
from fsdp_wrap._comm.groups import time_limit
from fsdp_wrap._comm.positions.group import GroupPositions, list_ranks, positions_of
from fsdp_wrap._core.torch_private import dump_flight_records, groups_alive

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
        text = ": ".join([*(line for line in ended if line not in str(error)), str(error)])
        told = tell_call(self.positions)
        return RuntimeError(f"{told}a collective failed: {text}\n{self.positions.table()}")

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
            told = tell_call(self.positions)
            raise RuntimeError(
                f"{told}a collective cannot complete without rank {rank}\n{self.positions.table()}"
            )

    def time_left(self, waited: float) -> float:
        """Returns the seconds left to wait for a collective after a wait of some seconds."""
        limit = self.limit()
        return limit - min(_MARGIN * limit, _LONGEST_MARGIN) - waited

    def is_late(self, waited: float) -> bool:
        """Whether a collective takes unusually long, after a wait of some seconds."""
        return waited > min(_PATIENCE * self.limit(), _LONGEST_PATIENCE)

    def report(self, waited: float, number: int, what: str = "") -> str:
        """Describes a collective that takes long, after a wait of some seconds, with all positions."""
        named = f" ({what})" if what else ""
        absent = self.positions.absent_from(number)
        named += f": {list_ranks(absent)} did not come" if absent else ""
        return (
            f"{tell_call(self.positions)}a collective issued {waited:.1f} s ago has not completed{named}; "
            "the group's time limit is "
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

    The recorder runs if it is enabled, usually by TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE.
    """
    try:
        entries = json.loads(dump_flight_records(True, True)).get("entries", [])
    except (RuntimeError, TypeError, ValueError):  # a build without one, or one of another form
        return ""
    active = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
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
