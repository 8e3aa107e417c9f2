"""How the clocks of ranks differ: on one host not at all, else by what messages through a store tell.

On Linux all processes of a host read one monotonic clock, which begins when the host starts. So ranks
compare what names that start. One rank of each other host asks rank 0 for the time, again and again: the
quickest answer is wrong by half of what it took at most.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter_ns
from typing import NamedTuple, Protocol

from fsdp_wrap._comm import host_id

_ROUNDS = 16
PATIENCE = timedelta(seconds=60)
"""For ranks that have yet to begin to record."""


class Store(Protocol):
    """What a `torch.distributed.Store` can do, as far as it is needed."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


class Clock(NamedTuple):
    """How a rank's clock relates to that of rank 0.

    Attributes:
        host: Names the rank's host and its start.
        offset: What to add to the rank's times, nanoseconds.
        error: How wrong that may be at most.
    """

    host: str
    offset: int
    error: int


def this_host() -> str:
    """Names this host and its start, so that a clock that began with it is known by the name."""
    return f"{socket.gethostname()} {host_id()}"


def align(
    store: Store,
    rank: int,
    size: int,
    host: str,
    now: Callable[[], int] = perf_counter_ns,
    patience: timedelta = PATIENCE,
) -> Clock:
    """Finds out how this rank's clock relates to that of rank 0; collective.

    Args:
        store: Through which the ranks meet; with keys of nobody else's.
        rank: This process's rank.
        size: How many ranks there are.
        host: Names the host of this rank and its clock.
        now: Reads the clock, nanoseconds.
        patience: How long to wait for the others.

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
        return Clock(host, 0, 0)
    if first:
        store.set(f"clock of {host}", "{} {}".format(*_ask(store, str(rank), now)))
    offset, error = store.get(f"clock of {host}").split()
    return Clock(host, int(offset), int(error))


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
    """Returns the offset and its error."""
    best: tuple[int, int] | None = None
    for turn in range(_ROUNDS):
        begin = now()
        store.set(f"asked by {asker}, {turn}", "")
        told = int(store.get(f"told to {asker}, {turn}"))
        end = now()
        if best is None or end - begin < 2 * best[1]:
            best = told - (begin + end) // 2, (end - begin + 1) // 2
    assert best is not None
    return best
