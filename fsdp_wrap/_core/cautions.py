"""Warnings, which point at the line of the program that caused them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OURS = ("fsdp_wrap", "torch")
"""Packages whose frames lie between a program's line and what warns: torch calls the hooks of modules."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is neither this package's nor torch's, else at the outermost line.

    Args:
        message: What is the matter, and what to do about it.
        category: The class of the warning.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 2
    while frame is not None and _is_ours(frame) and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _OURS
