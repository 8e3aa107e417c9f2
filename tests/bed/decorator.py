"""``@ranks``: a pytest test whose body runs in every rank."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bed.job import CannotTravel
from bed.pool import GRACE, TIMEOUT, make_job, run_on_pool
from bed.report import RankFailure

_Test = Callable[..., None]
Backend = str | Callable[[Mapping[str, Any]], str] | None
"""Backend of the default process group: a name, a function of a test's parameters, or None for no group."""


def ranks(
    *world_sizes: int, timeout: float = TIMEOUT, grace: float = GRACE, backend: Backend = "gloo"
) -> Callable[[_Test], _Test]:
    """Runs a test ``(rank, world_size, **others)`` once for each world size, its body in every rank.

    The others are parameters and fixtures as usual; their values are pickled. Each rank has a default process
    group of ``world_size`` ranks (``backend=None``: none) and the same seed, taken from the test's id.
    """

    def decorate(body: _Test) -> _Test:
        signature = inspect.signature(body)
        if list(signature.parameters)[:2] != ["rank", "world_size"]:
            raise TypeError(f"{body.__qualname__}: a test with @ranks takes (rank, world_size, ...)")

        @functools.wraps(body)
        def test(*, world_size: int, **others: Any) -> None:
            chosen = backend(others) if callable(backend) else backend
            try:
                run_on_pool(make_job(body, (), others, world_size, timeout, chosen), grace)
            except (RankFailure, CannotTravel) as failure:
                report = str(failure)
            else:
                return
            pytest.fail(report, pytrace=False)

        test.rank_body = body  # type: ignore[attr-defined]
        # What pytest sees: `rank` is no fixture.
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[value for name, value in signature.parameters.items() if name != "rank"]
        )
        return over_sizes(test)

    ids = [f"{size}ranks" for size in world_sizes]
    over_sizes: Callable[[_Test], _Test] = pytest.mark.parametrize("world_size", world_sizes, ids=ids)
    return decorate
