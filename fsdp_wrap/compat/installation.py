"""Changes of loaded modules, and of those that will be imported, that can be taken back."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Installation"]


class Installation(ExitStack):
    """The changes of one call of `install`; as a context manager it takes them back at the end."""

    def rebind(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end.

        Args:
            owner: A module or class.
            name: Name of the attribute.
            value: The new value.
        """
        self.callback(setattr, owner, name, inspect.getattr_static(owner, name))
        setattr(owner, name, value)

    def replace(self, pairs: Iterable[tuple[Any, Any]], kept: tuple[str, ...] = ()) -> None:
        """Rebinds what loaded modules hold until the end.

        Args:
            pairs: (old, new).
            kept: Prefixes of the names of modules that keep the old ones.
        """
        by_id = {id(old): new for old, new in pairs}
        for module in [candidate for candidate in sys.modules.values() if isinstance(candidate, ModuleType)]:
            for name, value in list(vars(module).items()):
                if id(value) in by_id and not module.__name__.startswith(kept):
                    self.rebind(module, name, by_id[id(value)])

    def set_environment(self, name: str, value: str) -> None:
        """Sets an environment variable until the end, if it is not set.

        Args:
            name: Name of the variable.
            value: The value.
        """
        if name not in os.environ:
            self.callback(os.environ.pop, name, None)
            os.environ[name] = value

    def when_imported(self, name: str, adapt: Callable[[Installation, Any], None]) -> None:
        """Calls `adapt(self, module)` once the module of that name is loaded: now, or later until the end.

        Args:
            name: Full name of the module.
            adapt: The function. It changes the module by the methods of the installation.
        """
        if name in sys.modules:
            adapt(self, sys.modules[name])
        else:
            finder = _OnImport(name, functools.partial(adapt, self))
            sys.meta_path.insert(0, finder)
            self.callback(finder.remove)

    def end(self) -> None:
        """Takes all changes back. Modules imported in between keep the names that they got."""
        self.close()


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, and calls a function with it when it has been loaded."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
