"""One crew of ranks per client, that is, per test file; what ran is told in a JUnit report.

`docs/clients.py` makes a page of such reports.
"""

import importlib.metadata
from collections.abc import Callable, Iterator

import pytest
import torch

from launch import Ranks


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Runs on as many ranks as the test file's `WORLD_SIZE` says, two by default."""
    crew = Ranks(getattr(request.module, "WORLD_SIZE", 2))
    yield crew
    crew.close()


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Records the versions that a test ran with, and what it shows."""
    client, shown = (request.node.get_closest_marker(name) for name in ("client", "shows"))
    record_property("torch", torch.__version__.partition("+")[0])
    record_property("clients", ", ".join(map(_with_version, client.args)))
    record_property("shows", shown.args[0] if shown else "equal")


def _with_version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package.replace('_', '-'))}"
