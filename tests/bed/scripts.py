"""Programs and files that are no part of a package: run in processes of their own, or imported as modules."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bed.paths import ROOT
from bed.patience import NEVER

_SHOWN = 6000
"""Characters of each output that a failure shows."""
_TO_END = 60
"""Seconds in which what is told to end ends; torchrun ends its ranks first."""


class Done(NamedTuple):
    """What is left of a command that has ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"it ended with {self.code}\n{self.out[-_SHOWN:]}\n{self.err[-_SHOWN:]}"


def here(**variables: str) -> dict[str, str]:
    """This process's environment with the checkout in front of what Python imports from."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


@contextmanager
def started(
    *command: object,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, of which nothing runs any more when the context ends.

    Args:
        command: The words of it.
        folder: Its working folder.
        env: Its whole environment; `here()` by default.
        first: What its process does before it becomes the command.
    """
    process = subprocess.Popen(
        [*map(str, command)],
        cwd=folder,
        env=here() if env is None else dict(env),
        preexec_fn=first,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> Done:
    """Tells a command to end, which torchrun passes on to its ranks, and makes sure that it does."""
    for by in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        with suppress(subprocess.TimeoutExpired):
            out, err = process.communicate(timeout=_TO_END)
            return Done(process.returncode, out, err)
    raise AssertionError(f"{process.args!r} does not end")


def finished(process: subprocess.Popen[str], given: str | None = None) -> Done:
    """Waits for the end of a command that was `started`, after giving it input."""
    try:
        out, err = process.communicate(given, timeout=NEVER)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{process.args!r} is stuck: {_end(process)}") from None
    return Done(process.returncode, out, err)


def run(
    *command: object,
    code: int | None = 0,
    given: str | None = None,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> Done:
    """Runs a command to its end, which is to have this code; None for any. The rest is as in `started`."""
    with started(*command, folder=folder, env=env, first=first) as process:
        done = finished(process, given)
    assert code in (None, done.code), f"{shlex.join(map(str, command))}\nis to end with {code}: {done}"
    return done


def python(
    *arguments: object,
    code: int | None = 0,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> Done:
    """Runs Python with these arguments, as `run` does."""
    return run(sys.executable, *arguments, code=code, folder=folder, env=env, first=first)


def on_ranks(ranks: int, *arguments: object) -> tuple[object, ...]:
    """The words after Python that start a script in so many processes of torchrun."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments)


def script(name: str, folder: str = "docs") -> ModuleType:
    """Imports `<folder>/<name>.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
