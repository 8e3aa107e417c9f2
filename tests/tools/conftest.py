"""What a plan collects as garbage is its own alone: the process of a whole session holds a million others."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
