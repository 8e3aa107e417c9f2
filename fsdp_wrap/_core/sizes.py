"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def nbytes_of(size: int | str, argument: str) -> int:
    """Returns a number of bytes given as one, or as a text: "80GB" (10^9 bytes each), "512MiB" (2^20).

    Args:
        size: It.
        argument: What the user calls it, for messages.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is not positive, or a text that tells none.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"{argument} must be a number of bytes, or a text such as '1GB', not {size!r}")
    nbytes = size
    if isinstance(size, str):
        found = _TEXT.fullmatch(size)
        units = {unit.lower(): value for unit, value in _UNITS.items()}
        if found is None or found[2].lower() not in units:
            raise ValueError(f"{argument} must be a number of bytes such as '1GB' or '512MiB', not {size!r}")
        nbytes = int(float(found[1]) * units[found[2].lower()])
    if int(nbytes) <= 0:
        raise ValueError(f"{argument} must be a positive number of bytes, not {size!r}")
    return int(nbytes)
