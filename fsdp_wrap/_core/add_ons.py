"""Add-ons: parts of the library that are imported when they are needed, or not installed at all.

An add-on can be deleted with its files, and the rest works without it. The core imports none of them: it
keeps a `Seam`, which the add-on fills when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class MissingAddOn(ImportError):
    """The files of an add-on that was asked for are not there."""


class Seam(Generic[T]):
    """A place of the core that an add-on fills when its folder, a package, is imported."""

    def __init__(self, add_on: str, folder: str) -> None:
        self._add_on = add_on
        self._folder = folder

    @cached_property
    def filled(self) -> T | None:
        """The content from the add-on, which is imported now; None if its files are not there."""
        if not all(map(find_spec, (self._folder.rpartition(".")[0] or self._folder, self._folder))):
            return None
        import_module(self._folder)
        brought: T = vars(self)["filled"]  # by `fill`
        return brought

    def fill(self, content: T) -> T:
        """Fills the seam, and returns the content: a decorator for functions and classes."""
        self.filled = content
        return content

    def needed(self, asked: str) -> T:
        """Returns the content; raises a MissingAddOn that names what asked for it if it is not there."""
        if self.filled is None:
            raise MissingAddOn(
                f"{asked} needs the add-on for {self._add_on}, and its folder is not in this installation: "
                "install fsdp_wrap as a whole"
            )
        return self.filled


def found_when_asked_for(
    package: str, modules: Sequence[str], exporting: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that imports some of its modules when asked for.

    `modules` are its public modules, which are its attributes as well. `exporting` are those of them from
    which the package exports names without importing them itself.
    """

    def find(name: str) -> Any:
        module = sys.modules[package]
        if name in modules and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        if name in module.__all__:
            there = filter(find_spec, (f"{package}.{exporter}" for exporter in exporting))
            for source in map(import_module, there):
                if name in source.__all__:
                    setattr(module, name, getattr(source, name))
                    return getattr(source, name)
        message = f"module {package!r} has no attribute {name!r}"
        if alike := get_close_matches(name, public_names(), n=1):
            message += f". Did you mean {alike[0]!r}?"
        raise AttributeError(message)

    def public_names() -> list[str]:
        there = [name for name in modules if find_spec(f"{package}.{name}")]
        return sorted({*sys.modules[package].__all__, *there})

    return find, public_names
