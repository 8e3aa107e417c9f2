"""Messages between pytest and the ranks: a job there, an outcome back."""

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import sys
from ast import parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from _pytest.assertion.rewrite import rewrite_asserts


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a function, found by name, made in every rank."""

    module: str
    path: str
    name: str
    payload: bytes
    """Pickled ``(args, kwargs)``: opaque on the way, because unpickling may need the job's module. The call
    is ``function(rank, world_size, *args, **kwargs)``."""
    world_size: int
    backend: str | None
    """None: no process group is made."""
    test: str
    """The test that asks for it, as pytest names it; empty outside of one."""
    seed: int
    timeout: float
    """Seconds after which it hangs if no rank has worked in them."""
    store: str = ""
    """A fresh file in which the ranks of the process group meet."""

    @property
    def longest(self) -> float:
        """Seconds in which it must be over, whatever the ranks do."""
        return 20 * self.timeout


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended on one rank."""

    kind: Literal["passed", "skipped", "failed", "hung", "died"]
    pid: int
    headline: str = ""
    """One line: the exception, the reason of a skip, or the way the process ended."""
    text: str = ""
    """The traceback, or the stacks of a hung rank."""
    output: str = ""
    """The end of what the rank wrote to stdout and stderr during this job."""
    exitcode: int | None = None
    """Exit code of a process that died: as in ``subprocess``, negative for a signal."""
    payload: bytes | None = None

    @property
    def value(self) -> Any:
        """The function's result."""
        return None if self.payload is None else pickle.loads(self.payload)


class CannotTravel(TypeError):
    """A function or a parameter that has no way to the ranks."""


def address(fn: Callable[..., Any]) -> dict[str, str]:
    """Returns where a rank finds ``fn``: the fields module, path and name of its job."""
    name = getattr(fn, "__qualname__", "")
    if not inspect.isfunction(fn) or not name.isidentifier():
        raise CannotTravel(
            f"{name or fn!r} must be a module-level function: ranks find it by module and name"
        )
    return {"module": fn.__module__, "path": os.path.abspath(inspect.getfile(fn)), "name": name}


def pack(owner: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickles a job's arguments."""
    try:
        return pickle.dumps((tuple(args), dict(kwargs)))
    except Exception as failure:
        raise CannotTravel(
            f"a parameter of {owner} cannot be pickled, so it cannot reach the ranks ({failure}); "
            "pass a name or a module-level object and build the value inside the body"
        ) from None


def resolve(job: Job) -> Callable[..., Any]:
    """Returns the job's function, in the rank; of a test with ``@ranks`` the body."""
    function: Callable[..., Any] = getattr(_load(job.module, job.path), job.name)
    return getattr(function, "rank_body", function)


def _load(name: str, path: str) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.abspath(getattr(loaded, "__file__", None) or "") == path:
        return loaded
    if not Path(path).name.startswith("test_"):
        return importlib.import_module(name)
    # By path, since under pytest's importlib mode the name of a test module is not importable.
    spec = importlib.util.spec_from_loader(name, _RewritingLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    """Gives the asserts of a test module pytest's messages; reads and writes no bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)
