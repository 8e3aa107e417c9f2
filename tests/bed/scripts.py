"""Programs and files that are no part of a package: run in processes of their own, or imported as modules."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bed.paths import ROOT
from bed.patience import NEVER

_SHOWN = 6000
"""Characters of each output that a failure shows."""
_TO_END = 60
"""Seconds in which what is told to end ends; torchrun ends its ranks first."""


class Done(NamedTuple):
    """Exit code and output of a command that has ended."""

    code: int
    out: str
    err: str

    @classmethod
    def of(cls, process: subprocess.Popen[str], given: str | None, limit: float) -> Done:
        """Waits for a process."""
        out, err = process.communicate(given, timeout=limit)
        return cls(process.returncode, out, err)

    def __str__(self) -> str:
        return f"it ended with {self.code}\n{self.out[-_SHOWN:]}\n{self.err[-_SHOWN:]}"


def here(**variables: str) -> dict[str, str]:
    """Returns this process's environment with the checkout in front of Python's path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run(
    *command: object,
    code: int | None = 0,
    given: str | None = None,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    first: Callable[[], None] | None = None,
) -> Done:
    """Runs a command to its end, after which nothing of it runs any more.

    Args:
        command: Its words.
        code: The expected exit code; None for any.
        given: Text for its standard input.
        folder: Its working folder.
        env: Its whole environment; `here()` by default.
        first: A function that its process calls before it becomes the command.
    """
    words = [*map(str, command)]
    process = subprocess.Popen(
        words,
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
        done = Done.of(process, given, NEVER)
    except BaseException as error:
        left = _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"{shlex.join(words)}\nis stuck: {left}") from None
        raise
    assert code in (None, done.code), f"{shlex.join(words)}\nis to end with {code}: {done}"
    return done


def _end(process: subprocess.Popen[str]) -> Done:
    """Tells a command to end, which torchrun passes on to its ranks, and makes sure that it does."""
    for by in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        with suppress(subprocess.TimeoutExpired):
            return Done.of(process, None, _TO_END)
    raise AssertionError(f"{process.args!r} does not end")


def called(main: Callable[[list[str]], int], capsys: Any, *arguments: object) -> Done:
    """Calls a program's `main` in this process."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return Done(code, *capsys.readouterr())


def python(*arguments: object, **options: Any) -> Done:
    """Runs Python with these arguments, as `run` does with its options."""
    return run(sys.executable, *arguments, **options)


def on_ranks(ranks: int, *arguments: object) -> tuple[object, ...]:
    """Returns the words after Python that start a script in so many processes of torchrun."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments)


def script(name: str, folder: str = "docs") -> ModuleType:
    """Imports `<folder>/<name>.py`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
