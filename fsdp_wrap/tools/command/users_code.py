"""Runs code of the user, as in `train.py:setup`, and reports its errors in one line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UsersError(Exception):
    """An error of the user's code; the text has its type, message and line."""


def load_function(text: str) -> Callable[..., Any]:
    """Returns the function that `FILE.py:name` names; runs the file as a module.

    Raises:
        UsersError: If the file raises an error.
        ValueError: If there is no such file or function.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"{text!r} names no function: write FILE.py:name, as in train.py:setup")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as for a script
    sys.modules.setdefault(spec.name, module)
    with errors_of(path, f"running {path}"):
        spec.loader.exec_module(module)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        functions = [
            attribute for attribute, value in vars(module).items() if callable(value) and attribute[0] != "_"
        ]
        own = [other for other in functions if getattr(getattr(module, other), "__module__", "") == spec.name]
        there = f"it has {', '.join(own)}" if own else "it has none"
        raise ValueError(f"{path} has no function {name!r}; {there}")
    return function


@contextmanager
def errors_of(path: Path, doing: str) -> Iterator[None]:
    """Turns an error of a file's code into a `UsersError` with the line; `doing` begins its message."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        if not lines:
            raise
        text = str(error).strip().splitlines() or [""]
        cause = f"{type(error).__name__}: {text[0]}" if text[0] else type(error).__name__
        raise UsersError(f"{doing} failed in line {lines[-1]}: {cause}; --traceback shows where") from error
