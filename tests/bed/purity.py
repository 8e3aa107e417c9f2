"""Which tests need no processes: those that lead to no function that starts one."""

import contextlib
import functools
import inspect
import multiprocessing
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import pytest

import bed
from bed.crew import Crew
from fsdp_wrap.tools.command.meeting import meet

_STARTERS: tuple[Any, ...] = (
    *(subprocess, multiprocessing, bed.run_ranks, bed.run_isolated, bed.shutdown),
    meet,  # all that the package starts
)
_ROOT = Path(__file__).resolve().parents[2]


def is_pure(item: pytest.Item) -> bool:
    """Whether neither the test nor a fixture of it starts processes, as far as their code tells."""
    if not isinstance(item, pytest.Function) or not item.path.is_relative_to(_ROOT):
        return False
    fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    return not any(_leads_to_a_start(function) for function in (item.obj, *fixtures))


@contextlib.contextmanager
def no_processes() -> Iterator[None]:
    """Refuses processes, so that no test is called pure and is not."""
    refusal = AssertionError("this test is marked as pure, and starts a process: tests/bed/purity.py")
    with (
        mock.patch.object(subprocess, "Popen", side_effect=refusal),
        mock.patch.object(Crew, "run", side_effect=refusal),
    ):
        yield


@functools.cache
def _leads_to_a_start(function: Any) -> bool:
    return _starts(function, set())


def _starts(found: Any, seen: set[int]) -> bool:
    """Whether `found` starts processes, or names of this repository's code that does."""
    if id(found) in seen:
        return False
    seen.add(id(found))
    if any(found is starter for starter in _STARTERS) or hasattr(found, "rank_body"):
        return True
    if isinstance(found, ModuleType) or not _is_ours(found := inspect.unwrap(found)):
        return False
    return any(_starts(value, seen) for function in _functions(found) for value in _named(function))


def _is_ours(found: Any) -> bool:
    """Whether it is a function or class of the tests, benchmarks or examples; the package starts none."""
    try:
        path = Path(inspect.getfile(found)).resolve()
    except (TypeError, OSError):
        return False
    return path.is_relative_to(_ROOT) and "fsdp_wrap" not in path.relative_to(_ROOT).parts


def _functions(found: Any) -> list[FunctionType]:
    members: list[Any] = list(vars(found).values()) if isinstance(found, type) else [found]
    unwrapped = [inspect.unwrap(getattr(member, "__func__", member)) for member in members]
    return [member for member in unwrapped if isinstance(member, FunctionType)]


def _named(function: FunctionType) -> Iterator[Any]:
    """Yields the values, in its module, of the names in a function's code."""
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
