"""Progress on standard error, from the third second on: a bar at a terminal, else a few lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm  # type: ignore[import-untyped]

_PATIENCE, _PACE = 2.0, 0.5  # seconds until it appears, and between changes of a bar
_SLOWER = 2.0  # how much longer each pause between lines is than the one before


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
        """Shows progress until `over` is set; a thread's work, since one task may take long."""
        if over.wait(_PATIENCE):
            return
        if sys.stderr.isatty():
            self._draw(over)
        else:
            self._print(over)

    def _draw(self, over: Event) -> None:
        style = "{desc} [{elapsed}]" if self._total is None else "{desc}: {n_fmt} of {total_fmt} [{elapsed}]"
        with tqdm(total=self._total, bar_format=style, leave=False, file=sys.stderr) as bar:
            while not over.wait(_PACE):
                bar.n = self._done
                bar.set_description_str(self._task)

    def _print(self, over: Event) -> None:
        """Prints lines, at growing intervals: an hour has about ten."""
        started, pause = time.monotonic() - _PATIENCE, _PATIENCE
        while True:
            count = "" if self._total is None else f": {self._done} of {self._total}"
            seconds = time.monotonic() - started
            print(f"{self._task}{count} [{seconds:.0f} s]", file=sys.stderr, flush=True)
            pause *= _SLOWER
            if over.wait(pause):
                return


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
