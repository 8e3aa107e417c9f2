"""Offsets between the clocks of ranks: 0 on one host, else measured by messages through a store.

On Linux all processes of a host read one monotonic clock, which begins when the host boots. So ranks compare
boot ids. One rank of each other host asks rank 0 for the time, again and again: the error of the quickest
answer is at most half of its round trip.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter_ns
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from fsdp_wrap._comm import host_id

_ROUNDS = 16
PATIENCE = timedelta(seconds=60)
"""Time for all ranks to begin the recording."""


class ClockOffset(NamedTuple):
    """The nanoseconds to add to a rank's times for those of rank 0, and their largest error."""

    host: str
    offset: int
    error: int


def this_host() -> str:
    """Returns the name of this host and its boot, which names its monotonic clock."""
    return f"{socket.gethostname()} {host_id()}"


def align(
    store: Store,
    rank: int,
    size: int,
    host: str,
    now: Callable[[], int] = perf_counter_ns,
    patience: timedelta = PATIENCE,
) -> ClockOffset:
    """Returns the offset of this rank's clock `now` to that of rank 0; collective.

    The store's keys must be nobody else's; `host` names this rank's host and clock.

    Raises:
        RuntimeError: If some ranks do not come.
    """
    store.set(f"host of {rank}", host)
    first = store.add(f"ranks on {host}", 1) == 1
    if rank != 0 and first:
        store.set(f"asks {store.add('askers', 1)}", str(rank))
    if store.add("ranks", 1) == size:
        store.set("all", "")
    _await(store, "all", rank, size, patience)
    of_first = store.get("host of 0").decode()
    if rank == 0:
        for number in range(1, store.add("askers", 0) + 1):
            asker = store.get(f"asks {number}").decode()
            if store.get(f"host of {asker}").decode() != of_first:
                _answer(store, asker, now)
    if host == of_first:
        return ClockOffset(host, 0, 0)
    if first:
        store.set(f"clock of {host}", "{} {}".format(*_ask(store, str(rank), now)))
    offset, error = store.get(f"clock of {host}").split()
    return ClockOffset(host, int(offset), int(error))


def _await(store: Store, key: str, rank: int, size: int, patience: timedelta) -> None:
    try:
        store.wait([key], patience)
    except RuntimeError as error:
        there = store.add("ranks", 0)
        raise RuntimeError(
            f"only {there} of {size} ranks have opened fsdp_wrap.timeline() within "
            f"{patience.total_seconds():.0f} s (rank {rank} is one); all must, since it compares their "
            "clocks: call it on every rank, around the same steps"
        ) from error


def _answer(store: Store, asker: str, now: Callable[[], int]) -> None:
    for turn in range(_ROUNDS):
        store.get(f"asked by {asker}, {turn}")
        store.set(f"told to {asker}, {turn}", str(now()))


def _ask(store: Store, asker: str, now: Callable[[], int]) -> tuple[int, int]:
    """Returns the offset and its largest error."""
    best: tuple[int, int] | None = None
    for turn in range(_ROUNDS):
        begin = now()
        store.set(f"asked by {asker}, {turn}", "")
        answer = int(store.get(f"told to {asker}, {turn}"))
        end = now()
        if best is None or end - begin < 2 * best[1]:
            best = answer - (begin + end) // 2, (end - begin + 1) // 2
    assert best is not None
    return best
