"""Telling what is stuck from what is slow, on a machine that may be busy with other things."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

NEVER = 600.0
"""Seconds after which what has not come will not come. By it nothing is judged: it ends what is stuck."""
_LOOKS = 4
_AT_WORK = 0.05
"""Share of a processor's time that a busy thread gets beside many others. A waiting thread takes less."""

_Thread = tuple[int, str]


def until(condition: Callable[[], object], pause: float = 0.01) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + NEVER
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never happened")
        time.sleep(pause)


class Patience:
    """Waits for processes as long as any of them works.

    Args:
        silence: Seconds in which none works, after which they are stuck.
        longest: Seconds after which they are stuck although they work.
    """

    def __init__(self, silence: float, longest: float) -> None:
        self._silence, self._longest = silence, longest
        self._begin = self._looked = self._worked = time.monotonic()
        self._taken: dict[_Thread, float] = {}

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return self._silence / _LOOKS

    def shorten(self, silence: float) -> None:
        """Begins to wait anew, and not so long."""
        self._silence, self._worked = min(silence, self._silence), time.monotonic()

    def has_ended(self, processes: Iterable[int]) -> bool:
        """Looks at the processes; returns whether it is in vain to wait for them any more."""
        now, taken = time.monotonic(), _seconds_taken(processes)
        busiest = max(
            (taken[each] - self._taken[each] for each in taken.keys() & self._taken.keys()), default=0
        )
        if busiest > _AT_WORK * (now - self._looked):
            self._worked = now
        self._looked, self._taken = now, taken
        return now - self._worked >= self._silence or now - self._begin >= self._longest

    def __str__(self) -> str:
        now = time.monotonic()
        silent = now - self._worked
        what = f"no rank at work for {silent:.1f} s" if silent >= self._silence else "though at work"
        return f"no answer after {now - self._begin:.1f} s, {what}"


def _seconds_taken(processes: Iterable[int]) -> dict[_Thread, float]:
    """Returns the processor's time of each thread, where the system tells."""
    taken = {}
    for process in processes:
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                taken[process, file.parent.name] = int(file.read_text().split()[0]) / 1e9
    return taken
