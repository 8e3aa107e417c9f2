"""Bars on standard error for what takes longer than two seconds; what is done before shows none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds until a bar appears."""


def watched(things: Iterable[T], doing: str, size_of: Callable[[T], int], total: int) -> Iterator[T]:
    """Yields things, and shows how far the one who takes them has come.

    Args:
        things: What is yielded.
        doing: What is done with them, before the bar.
        size_of: The bytes of one.
        total: The bytes of all.
    """
    with tqdm(
        total=total, desc=doing, unit="B", unit_scale=True, delay=PATIENCE, leave=False, file=sys.stderr
    ) as bar:
        for thing in things:
            yield thing
            bar.update(size_of(thing))
