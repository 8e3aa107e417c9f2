"""Errors of the user that programs written for torch may catch by another built-in type than ours."""

from __future__ import annotations

__all__ = ["AlreadySharded", "CannotCut", "NoSuchDimension", "WithoutValues"]


class AlreadySharded(ValueError, AssertionError):
    """A module is in a unit already; torch's `fully_shard` raises an AssertionError."""


class NoSuchDimension(ValueError, AssertionError):
    """A parameter is to be cut along a dimension that it does not have; torch raises an AssertionError."""


class CannotCut(ValueError, NotImplementedError):
    """A parameter cannot be cut as it was asked for; torch raises a NotImplementedError."""


class WithoutValues(ValueError, RuntimeError):
    """Parameters on the meta device were to compute; torch raises a RuntimeError."""
