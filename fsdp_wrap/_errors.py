"""Errors that are of several types: of ours, and of what torch raises in the same place."""

from __future__ import annotations

__all__ = ["ChangedBetweenError", "NotIdleError"]


class NotIdleError(RuntimeError, AssertionError, ValueError):
    """What must not run inside a forward, a backward or `summon_full_params` was called there."""


class ChangedBetweenError(RuntimeError, AssertionError):
    """Parameters were changed between a forward and its backward."""
