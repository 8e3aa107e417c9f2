"""Jobs as function calls: on the pool that all tests share, or on processes of their own."""

import atexit
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from bed.crew import Crew
from bed.job import Job, Outcome, address, pack
from bed.report import RankFailure

POOL_SIZE = 4
"""The most ranks of a job on the pool."""
TIMEOUT = 60.0
"""Seconds after which a job hangs if no rank has worked in them."""
GRACE = 3.0
"""The same for the other ranks once one did not pass."""

_pool = Crew()
# Registered after multiprocessing's own handler, so it runs before that one joins what is still alive.
atexit.register(_pool.close)


def shutdown() -> None:
    """Ends the pool's processes; a later job starts new ones."""
    _pool.dismiss()


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, grace: float = GRACE, **options: Any
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` on ranks of the pool and returns the results in rank order.

    Options are those of ``make_job``.

    Raises ``RankFailure`` unless every rank passes, and skips the calling test where every rank skips.
    """
    __tracebackhide__ = True
    return run_on_pool(make_job(fn, args, {}, world_size, **options), grace)


def run_isolated(
    fn: Callable[..., Any], *args: Any, world_size: int = 1, grace: float = 10.0, **options: Any
) -> list[Outcome]:
    """Calls ``fn(rank, world_size, *args)`` in fresh processes, which may crash; returns how each ended.

    Options are those of ``make_job``. ``grace`` is longer than the pool's, since in a kill test the
    survivors' errors are the point.
    """
    crew = Crew()
    try:
        return crew.run(make_job(fn, args, {}, world_size, **options), grace)
    finally:
        crew.close()


def make_job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    world_size: int,
    timeout: float = TIMEOUT,
    backend: str | None = "gloo",
) -> Job:
    """Describes the call ``fn(rank, world_size, *args, **kwargs)``."""
    where = address(fn)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]  # without the phase, "(call)"
    seed = zlib.crc32((test or where["name"]).encode())
    payload = pack(where["name"], args, kwargs)
    return Job(
        **where,
        payload=payload,
        world_size=world_size,
        backend=backend,
        test=test,
        seed=seed,
        timeout=timeout,
    )


def run_on_pool(job: Job, grace: float) -> list[Any]:
    """Runs ``job`` and turns its outcomes into results, a skip or a ``RankFailure``."""
    __tracebackhide__ = True
    if not 1 <= job.world_size <= POOL_SIZE:
        raise ValueError(f"the pool has 1 to {POOL_SIZE} ranks, not {job.world_size}; see run_isolated")
    outcomes = _pool.run(job, grace)
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"skipped"}:
        pytest.skip(outcomes[0].headline)
    if kinds != {"passed"}:
        raise RankFailure(outcomes)
    return [outcome.value for outcome in outcomes]
