"""One crew of ranks per client, that is, per test file."""

from collections.abc import Iterator

import pytest

from launch import Ranks


@pytest.fixture(scope="module")
def run() -> Iterator[Ranks]:
    crew = Ranks()
    yield crew
    crew.close()
