"""Parts of the library that are imported when they are needed, or not at all.

Add-ons can be deleted with their files, and the rest works without them. The core imports none of them. Where
it has use for what one of them brings it keeps a `Seam`, which the add-on fills when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class MissingAddOn(ImportError):
    """What was asked for comes from an add-on whose files are not there."""


class Seam(Generic[T]):
    """Where the core takes what an add-on brings.

    Args:
        add_on: Its name, for messages.
        folder: The package that fills the seam when it is imported; it is imported when somebody asks.
    """

    def __init__(self, add_on: str, folder: str) -> None:
        self._add_on = add_on
        self._folder = folder

    @cached_property
    def filled(self) -> T | None:
        """What the add-on has brought; None if its files are not there."""
        if find_spec(self._folder) is None:
            return None
        import_module(self._folder)
        brought: T = vars(self)["filled"]  # by `fill`
        return brought

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


def names_of_folders(package: str, *folders: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that imports some of its folders when they are asked for.

    Args:
        package: Its full name. What it exports and has not, one of the folders exports.
        folders: Their names. They are attributes of the package as well.
    """

    def find(name: str) -> Any:
        module = sys.modules[package]
        if name in folders and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        if name in module.__all__:
            for folder in map(import_module, (f"{package}.{each}" for each in folders)):
                if name in folder.__all__:
                    setattr(module, name, getattr(folder, name))
                    return getattr(folder, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
