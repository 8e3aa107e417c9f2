"""Errors of several types: of ours, and of what programs written for torch catch in the same place."""

from __future__ import annotations

__all__ = [
    "AlreadyShardedError",
    "CannotCutError",
    "ChangedBetweenError",
    "NoSuchDimensionError",
    "NotIdleError",
    "WithoutValuesError",
]


class NotIdleError(RuntimeError, AssertionError, ValueError):
    """What must not run inside a forward, a backward or `summon_full_params` was called there."""


class ChangedBetweenError(RuntimeError, AssertionError):
    """Parameters were changed between a forward and its backward."""


class AlreadyShardedError(ValueError, AssertionError):
    """A module is in a unit already; torch's `fully_shard` raises an AssertionError."""


class NoSuchDimensionError(ValueError, AssertionError):
    """A parameter is to be cut along a dimension that it does not have; torch raises an AssertionError."""


class CannotCutError(ValueError, NotImplementedError):
    """A parameter cannot be cut as it was asked for; torch raises a NotImplementedError."""


class WithoutValuesError(ValueError, RuntimeError):
    """Parameters on the meta device were to compute; torch raises a RuntimeError."""
