"""Telling what is stuck from what is slow, on a machine that may be busy with other things."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

NEVER = 600.0
"""Seconds after which what has not come will not come. By it nothing is judged: it ends what is stuck."""
_LOOKS = 4
_AT_WORK = 0.05
"""Share of a processor's time that a waiting thread, which may look again and again, does not take."""
_IN_LINE = 0.5
"""Share of the time in which busy threads run or could run, in turn, however many others there are.

A thread that waits for something else looks again from time to time, and sleeps in between.
"""

_Thread = tuple[int, str]


class _Taken(NamedTuple):
    """Seconds in which a thread has run, and in which it could have run but no processor was free."""

    running: float
    in_line: float


def until(condition: Callable[[], object], pause: float = 0.01) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + NEVER
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it never happened")
        time.sleep(pause)


class Patience:
    """Waits for processes as long as any of them, or of the processes that they have started, works.

    Args:
        silence: Seconds in which none works, after which they are stuck.
        longest: Seconds after which they are stuck although they work.
    """

    def __init__(self, silence: float, longest: float) -> None:
        self._silence, self._longest = silence, longest
        self._begin = self._looked = self._worked = time.monotonic()
        self._taken: dict[_Thread, _Taken] = {}

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return self._silence / _LOOKS

    def shorten(self, silence: float) -> None:
        """Starts to wait again, for less time."""
        self._silence, self._worked = min(silence, self._silence), time.monotonic()

    def has_ended(self, processes: Iterable[int]) -> bool:
        """Looks at the processes; returns whether waiting for them longer is pointless."""
        now, taken = time.monotonic(), _seconds_taken(processes)
        seconds, longest, together = now - self._looked, 0.0, 0.0
        for thread in taken.keys() & self._taken.keys():
            running, in_line = (after - before for after, before in zip(taken[thread], self._taken[thread]))
            longest, together = max(longest, running), together + running + in_line
        if longest > _AT_WORK * seconds or together > _IN_LINE * seconds:
            self._worked = now
        self._looked, self._taken = now, taken
        return now - self._worked >= self._silence or now - self._begin >= self._longest

    def __str__(self) -> str:
        now = time.monotonic()
        silent = now - self._worked
        what = f"no rank at work for {silent:.1f} s" if silent >= self._silence else "though at work"
        return f"no answer after {now - self._begin:.1f} s, {what}"


def _seconds_taken(processes: Iterable[int]) -> dict[_Thread, _Taken]:
    """Returns what each thread of the processes, and of all that they have started, has taken so far.

    It is empty where the system does not tell.
    """
    taken = {}
    for process in _with_descendants(processes):
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                running, in_line, _ = map(int, file.read_text().split())
                taken[process, file.parent.name] = _Taken(running / 1e9, in_line / 1e9)
    return taken


def _with_descendants(processes: Iterable[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, after_name = file.read_text(errors="replace").rpartition(")")
            children.setdefault(int(after_name.split()[1]), []).append(int(file.parent.name))
    family = [*processes]
    for process in family:  # which grows meanwhile
        family += children.get(process, [])
    return family
