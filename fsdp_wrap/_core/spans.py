"""Spans of a step: reports to watchers when the runtime issues collectives, waits and computes.

Events (`_core/events.py`) report that something happened, spans how long it took. Without watchers, every
span is `NO_SPAN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import get_ident
from typing import Any, NamedTuple

import torch

from fsdp_wrap._core.events import Phase
from fsdp_wrap._core.torch_private import profiler_runs


class SpanKind(Enum):
    """Kinds of runtime activity.

    Attributes:
        GATHER: Fills the send buffers of one or more units and issues their all-gather.
        AWAIT_GATHER: Waits for a unit's all-gather, and makes its parameters usable.
        REDUCE: Issues the reduction of the gradients of one or more units.
        AWAIT_REDUCTION: Waits for the reduction, and takes its result.
        COPY: Issues the copy of a unit's shards, or of its activations, between host memory and the device.
        AWAIT_COPIES: Blocks the host until copies from and to its memory are done.
        UPDATE: Updates a unit by its optimizer in the backward.
        HELP: Takes part in a forward and backward of other ranks, without a batch (`uneven`); for the root.
    """

    GATHER = "gather"
    AWAIT_GATHER = "await gather"
    REDUCE = "reduce"
    AWAIT_REDUCTION = "await reduction"
    COPY = "copy"
    AWAIT_COPIES = "await copies"
    UPDATE = "update"
    HELP = "help"


class Computing(Enum):
    """Kinds of a unit's computation; `RECOMPUTE`: a forward in a backward (activation checkpointing)."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(eq=False, slots=True)
class Span:
    """One activity of the runtime, as a context.

    Watchers get the same object at the beginning and at the end.

    Attributes:
        kind: Kind of activity.
        unit: Fully qualified name of the (first) unit, "" for the root.
        phase: Phase of the iteration; None if unknown.
        owners: The units as objects: units of two models may have equal names.
        nbytes: Bytes of the buffers on this rank; set by the end of the span for a reduction.
        together: Names of the units that share a collective; empty for a single unit.
        beside: Whether it runs in a thread of its own, concurrently with computation.
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
    """Null object in place of a span without watchers."""

    nbytes = 0  # written, never read

    # Functions of C that take anything, and give nothing: a step without watchers enters no frame for them.
    __enter__: Callable[..., Any] = staticmethod(dict)
    __exit__: Callable[..., Any] = staticmethod("".format)


NO_SPAN = NoSpan()


class StepWatcher:
    """Receives the spans of a step, in the thread in which they happen; a base that ignores all of them.

    A watcher added in the middle of a step receives `end` without `begin`.
    """

    def begin(self, span: Span) -> None:
        """Notes the beginning of a span; spans of one thread nest."""

    def end(self, span: Span) -> None:
        """Notes the end of a span, also by an error."""

    def enter(self, owner: Any, unit: str, what: Computing) -> None:
        """Notes that a unit begins to compute; other units may begin before it ends."""

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        """Notes that a unit ends computing: several times for some backwards, never for failed ones."""

    def hold(self, owner: Any, unit: str, nbytes: int) -> None:
        """Notes a change of the bytes of a unit's full parameters in memory; negative when they are freed."""

    def issued(self, works: Sequence[Any]) -> None:
        """Notes the `Work` objects of collectives that the running span has issued."""

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        """Notes work issued on an accelerator's stream.

        Args:
            purpose: Purpose of the stream: "gather", "reduce", "to device", "to host", or of activations.
            begin: Timing event before the work.
            end: Timing event after the work.
        """


step_watchers: list[StepWatcher] = []
"""Active watchers, to which every step of this process is reported."""


def span(
    kind: SpanKind,
    unit: str,
    phase: Phase | None,
    owners: Sequence[Any],
    nbytes: int = 0,
    together: tuple[str, ...] = (),
    beside: bool = False,
) -> Span | NoSpan:
    """Returns a `Span` as a context; `NO_SPAN` without watchers."""
    return Span(kind, unit, phase, owners, nbytes, together, beside) if step_watchers else NO_SPAN


class _Range(NamedTuple):
    """An open range of `torch.profiler`."""

    what: Any  # the span, or (unit, Computing)
    unit: str
    range: Any


class ProfilerRanges(StepWatcher):
    """Shows units as ranges of `torch.profiler`: "fsdp_wrap: backward blocks.3"."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Range]] = {}  # by thread

    def _begin(self, what: Any, unit: str, name: str) -> None:
        opened = torch.profiler.record_function(f"fsdp_wrap: {name} {unit or '(root)'}")
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.setdefault(get_ident(), []).append(_Range(what, unit, opened))

    def _end(self, what: Any) -> None:
        """Ends a range, and its inner ranges, if it is open in this thread."""
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
        if what is Computing.BACKWARD:  # the one before may not have ended
            self._end_while(lambda each: not encloses(each.unit, unit) and each.what[1] is what)
        self._begin((owner, what), unit, what.value)

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        self._end((owner, what))

    def close(self) -> None:
        """Ends the open ranges of this thread; a failed backward may have left some."""
        self._end_while(lambda _: True)


def encloses(outer: str, inner: str) -> bool:
    """Whether a unit encloses another one, by their names."""
    return not outer or inner.startswith(f"{outer}.")


_ranges = ProfilerRanges()


def follow_profiler() -> None:
    """Starts or stops showing units as ranges of `torch.profiler`, depending on whether it is active."""
    active = profiler_runs()
    if active != (_ranges in step_watchers):
        _ranges.close()
        (step_watchers.append if active else step_watchers.remove)(_ranges)
