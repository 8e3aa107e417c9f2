"""What people who wait at a terminal see: a bar on standard error, once something has taken two seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from tqdm import tqdm  # type: ignore[import-untyped]

_PATIENCE, _PACE = 2.0, 0.5  # seconds until it appears, and between its changes


class Bar:
    """Tells how much is done, and how long that has taken.

    Args:
        total: How many things there are to do; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._doing = ""

    def begins(self, doing: str) -> None:
        """Tells what is being done."""
        self._doing = doing

    def ended(self) -> None:
        """Counts one thing that is done."""
        self._done += 1

    def show(self, over: Event) -> None:
        """Shows all this, from two seconds on, until something is over."""
        if over.wait(_PATIENCE):
            return
        style = "{desc} [{elapsed}]" if self._total is None else "{desc}: {n_fmt} of {total_fmt} [{elapsed}]"
        # `None` shows none where standard error is no terminal.
        with tqdm(total=self._total, bar_format=style, leave=False, disable=None, file=sys.stderr) as bar:
            while not over.wait(_PACE):
                bar.n = self._done
                bar.set_description_str(self._doing)


@contextmanager
def shown(total: int | None = None, *, disable: bool = False) -> Iterator[Bar]:
    """Shows how far what is done inside has come.

    Args:
        total: How many things there are to do; None if that is not known.
        disable: Show nothing.
    """
    bar, over = Bar(total), Event()
    if disable:
        yield bar
        return
    thread = Thread(target=bar.show, args=(over,), name="fsdp_wrap.progress", daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        over.set()
        thread.join()
