"""A progress bar on standard error, which appears after two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm  # type: ignore[import-untyped]

_PATIENCE, _PACE = 2.0, 0.5  # seconds until it appears, and between its changes


class ProgressBar:
    """Shows the current task, how many of `total` (None: unknown) are done, and the time so far."""

    def __init__(self, total: int | None, disable: bool = False) -> None:
        self._total, self._disable = total, disable
        self._done = 0
        self._task = ""

    def describe(self, task: str) -> None:
        """Sets the current task."""
        self._task = task

    def advance(self) -> None:
        """Counts one task as done."""
        self._done += 1

    def report(self, line: str) -> None:
        """Prints a line above the bar, unless it is disabled."""
        if not self._disable:
            tqdm.write(line, file=sys.stderr)

    def run(self, over: Event) -> None:
        """Draws the bar until `over` is set; a thread's work, since one task may take long."""
        if over.wait(_PATIENCE):
            return
        style = "{desc} [{elapsed}]" if self._total is None else "{desc}: {n_fmt} of {total_fmt} [{elapsed}]"
        # `disable=None` draws nothing where standard error is no terminal.
        with tqdm(total=self._total, bar_format=style, leave=False, disable=None, file=sys.stderr) as bar:
            while not over.wait(_PACE):
                bar.n = self._done
                bar.set_description_str(self._task)


@contextmanager
def progress_bar(total: int | None = None, *, task: str = "", disable: bool = False) -> Iterator[ProgressBar]:
    """Shows a bar while the context is open."""
    bar, over = ProgressBar(total, disable), Event()
    bar.describe(task)
    if disable:
        yield bar
        return
    thread = Thread(target=bar.run, args=(over,), name="fsdp_wrap.progress", daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        over.set()
        thread.join()
