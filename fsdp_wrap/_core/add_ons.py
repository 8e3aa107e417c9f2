"""Add-ons: parts of the library that can be deleted with their files, and the rest works without them.

The core imports none of them. Where it has use for what one of them brings it keeps a `Seam`, which the
add-on fills when it is imported. `fsdp_wrap/__init__.py` imports those whose files are there.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class MissingAddOn(ImportError):
    """What was asked for comes from an add-on whose files are not there."""


class Seam(Generic[T]):
    """Where the core takes what an add-on brings.

    Args:
        add_on: Its name, for messages.

    Attributes:
        filled: What it has brought; None if it is not there.
    """

    def __init__(self, add_on: str) -> None:
        self._add_on = add_on
        self.filled: T | None = None

    def fill(self, content: T) -> T:
        """Takes what the add-on brings, and returns it: a decorator for functions and classes."""
        self.filled = content
        return content

    def needed(self, asked: str) -> T:
        """Returns what the add-on has brought.

        Args:
            asked: What needs it, for the error's text.

        Raises:
            MissingAddOn: If it is not there.
        """
        if self.filled is None:
            raise MissingAddOn(
                f"{asked} needs the add-on for {self._add_on}, and its folder is not in this installation: "
                "install fsdp_wrap as a whole"
            )
        return self.filled
