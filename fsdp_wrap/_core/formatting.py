"""Bytes, seconds and counts as people read them, in decimal units: 1 GB is 1e9 bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def format_bytes(nbytes: float) -> str:
    """Returns a size such as "1.65 GB"; with "/s" after it, a rate."""
    for unit, least in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= least:
            return f"{nbytes / least:.{2 if nbytes < 100 * least else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """Returns a duration such as "5.45 ms"; "" for None."""
    if seconds is None:
        return ""
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{seconds / least:.{2 if seconds < 10 * least else 1}f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def format_count(number: float) -> str:
    """Returns a number with its SI prefix, such as "70.6 G"."""
    for prefix, least in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g} {prefix}"
    return str(number)


def format_dtype(dtype: torch.dtype) -> str:
    """Returns a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def listed(names: Iterable[object], most: int = 10) -> str:
    """Returns names for a message: the first ones and the number of others."""
    every = [*map(str, names)]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
