"""Spans of a step: when the runtime issues, waits and computes, told to watchers.

Events (`_core/events.py`) tell that something happened; spans tell for how long. While nobody watches, every
span is `NO_SPAN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch

from fsdp_wrap._core.events import Phase
from fsdp_wrap._core.torch_private import torch_profiler


class SpanKind(Enum):
    """What the runtime does for a while.

    Attributes:
        GATHER: Issues the all-gather of a unit, or of several: fills what travels, and asks for it.
        AWAIT_GATHER: Waits for what a unit gathers, and makes its parameters usable.
        REDUCE: Issues the reduction of the gradients of a unit, or of several.
        AWAIT_REDUCTION: Waits for the reduction, and hands on what came of it.
        SEND_AHEAD: Issues the copy of a unit's shards from host memory.
        AWAIT_COPIES: Lets the host wait for copies from and to its memory.
        UPDATE: Lets an optimizer update a unit in the backward.
    """

    GATHER = "gather"
    AWAIT_GATHER = "await gather"
    REDUCE = "reduce"
    AWAIT_REDUCTION = "await reduction"
    SEND_AHEAD = "send ahead"
    AWAIT_COPIES = "await copies"
    UPDATE = "update"


class Computing(Enum):
    """What a unit computes.

    Attributes:
        FORWARD: Its forward.
        RECOMPUTE: Its forward again, in a backward (activation checkpointing).
        BACKWARD: Its backward.
    """

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(eq=False, slots=True)
class Span:
    """One thing that the runtime does for a while, as a context.

    Watchers get the same object when it begins and when it ends.

    Attributes:
        kind: What it does.
        unit: Fully qualified name of the unit, "" for the root; of several the first.
        phase: Where in the iteration; None where it is not known.
        owners: The units, each the object itself: names of two models may be equal.
        nbytes: Bytes of the buffers concerned, on this rank; of a reduction known when the span ends.
        together: The names of the units whose buffers travel in one collective; none where it is one.
        beside: Whether it goes on in a thread of its own, beside what units compute.
    """

    kind: SpanKind
    unit: str
    phase: Phase | None
    owners: Sequence[Any] = ()
    nbytes: int = 0
    together: tuple[str, ...] = ()
    beside: bool = False

    def __enter__(self) -> Span:
        for watcher in step_watchers:
            watcher.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        for watcher in step_watchers:
            watcher.end(self)


class NoSpan:
    """Stands for a span while nobody watches.

    Attributes:
        nbytes: Written as a span's, and never read.
    """

    nbytes = 0

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_SPAN = NoSpan()


class StepWatcher(Protocol):
    """Receives the spans of a step, in the thread in which they happen.

    A watcher that is added in the middle of a step gets ends without beginnings.
    """

    def begin(self, span: Span) -> None:
        """Notes that a span begins; those of one thread nest."""

    def end(self, span: Span) -> None:
        """Notes that a span ends, also where it ends by an error."""

    def enter(self, owner: Any, unit: str, what: Computing) -> None:
        """Notes that a unit begins to compute; others may begin before that is over."""

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        """Notes that this is over; a backward may tell so more than once, and one that fails never does."""

    def hold(self, owner: Any, unit: str, nbytes: int) -> None:
        """Notes that so many bytes more of a unit's full parameters are held; less where it is negative."""

    def issued(self, works: Sequence[Any]) -> None:
        """Notes what a process group has returned for collectives that the running span has issued."""

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        """Notes what was issued on an accelerator's stream.

        Args:
            purpose: Of the stream: "gather", "reduce", "to device" or "to host".
            begin: The timing event before it.
            end: The one after it.
        """


step_watchers: list[StepWatcher] = []
"""All watchers."""


def span(
    kind: SpanKind,
    unit: str,
    phase: Phase | None,
    owners: Sequence[Any],
    nbytes: int = 0,
    together: tuple[str, ...] = (),
    beside: bool = False,
) -> Span | NoSpan:
    """Returns a span as a context, with the attributes of `Span`; `NO_SPAN` while nobody watches."""
    return Span(kind, unit, phase, owners, nbytes, together, beside) if step_watchers else NO_SPAN


@contextmanager
def watching_steps(watcher: StepWatcher) -> Iterator[None]:
    """Tells `watcher` of every step of this process while the context is open."""
    step_watchers.append(watcher)
    try:
        yield
    finally:
        step_watchers.remove(watcher)


class _Range(NamedTuple):
    """A range of `torch.profiler` that is open in a thread.

    Attributes:
        what: The span, or the unit with what it computes.
        unit: The unit's name.
        range: It.
    """

    what: Any
    unit: str
    range: Any


class ProfilerRanges:
    """A `StepWatcher` that shows units as ranges of `torch.profiler`: "fsdp_wrap: backward blocks.3"."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Range]] = {}  # by thread

    def _begin(self, what: Any, unit: str, name: str) -> None:
        opened = torch.profiler.record_function(f"fsdp_wrap: {name} {unit or '(root)'}")
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.setdefault(get_ident(), []).append(_Range(what, unit, opened))

    def _end(self, what: Any) -> None:
        """Ends a range, and those within it, if it is open in this thread."""
        ranges = self._open.get(get_ident(), [])
        if any(each.what == what for each in ranges):
            self._end_while(lambda each: each.what != what)
            ranges.pop().range.__exit__(None, None, None)

    def _end_while(self, unwanted: Callable[[_Range], bool]) -> None:
        ranges = self._open.get(get_ident(), [])
        while ranges and unwanted(ranges[-1]):
            ranges.pop().range.__exit__(None, None, None)

    def begin(self, span: Span) -> None:
        self._begin(span, span.unit, span.kind.value)

    def end(self, span: Span) -> None:
        self._end(span)

    def enter(self, owner: Any, unit: str, what: Computing) -> None:
        if what is Computing.BACKWARD:  # one begins while that before it may not have ended
            self._end_while(lambda each: not encloses(each.unit, unit) and each.what[1] is what)
        self._begin((owner, what), unit, what.value)

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        self._end((owner, what))

    def hold(self, owner: Any, unit: str, nbytes: int) -> None:
        return None

    def issued(self, works: Sequence[Any]) -> None:
        return None

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        return None

    def close(self) -> None:
        """Ends what is open in this thread, which a failed backward may have left."""
        self._end_while(lambda _: True)


def encloses(outer: str, inner: str) -> bool:
    """Whether a unit is around another one, by their names."""
    return not outer or inner.startswith(f"{outer}.")


_ranges = ProfilerRanges()


def follow_profiler() -> None:
    """Shows units as ranges of `torch.profiler` from now on if it is active, and no more if it is not."""
    active = torch_profiler._is_profiler_enabled
    if active != (_ranges in step_watchers):
        _ranges.close()
        (step_watchers.append if active else step_watchers.remove)(_ranges)
