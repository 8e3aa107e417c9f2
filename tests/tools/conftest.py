"""Hides earlier objects from the garbage collector: a plan collects, and a test session holds a million."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
