"""`TimelineRecorder`: a log of the runtime's steps with times, which `assemble.py` interprets afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from itertools import repeat
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_wrap._comm import Accelerator, when_completed
from fsdp_wrap._core import Computing, Phase, PlugIn, Span, SpanKind


class RecordKind(Enum):
    """The kind of an entry of the log."""

    BEGIN = "begin"
    END = "end"
    ENTER = "enter"
    LEAVE = "leave"
    HOLD = "hold"
    OPTIMIZE = "optimize"
    OPTIMIZED = "optimized"


class TimelineRecord(NamedTuple):
    """One entry: nanoseconds of the host's clock, a timing event of the current stream (None on a CPU).

    The subject is a span or a unit; the detail is a `Computing`, or a change of bytes.
    """

    at: int
    event: Any
    kind: RecordKind
    subject: Any
    detail: Any = None


class StreamRange(NamedTuple):
    """The work of a span on an accelerator's stream, between two timing events."""

    span: Span
    purpose: str
    begin: Any
    end: Any


class HostUpdate(NamedTuple):
    """The update of a unit in a thread beside the backward, by the host's clock."""

    span: Span
    begin: int
    end: int


class TimelineRecorder(PlugIn):
    """A plug-in that logs the units in `names`, and optimizers that step one of `params`.

    `completed` has the completion times of each span's works, and `works` their number. `base` is one moment
    as the host's clock and as a timing event; None on a CPU.
    """

    def __init__(
        self, names: Mapping[Any, str], params: Sequence[torch.Tensor], accelerator: Accelerator | None
    ) -> None:
        self.names = names
        self._params = {id(param) for param in params}
        # Columns, since the garbage collector would visit every row.
        self._at: list[int] = []
        self._events: list[Any] = []
        self._kinds: list[RecordKind] = []
        self._subjects: list[Any] = []
        self._details: list[Any] = []
        self.completed: dict[Span, list[int]] = {}
        self.works: dict[Span, int] = {}
        self.stream_ranges: list[StreamRange] = []
        self.updates: list[HostUpdate] = []
        self._updating: dict[Span, int] = {}  # their beginnings
        self._accelerator = accelerator
        self._running: dict[int, list[Span]] = {}  # by thread, in which they nest
        self._hooks = ExitStack()
        self.base: tuple[int, Any] | None = None
        if accelerator is not None:
            event = accelerator.record_time()
            event.synchronize()
            self.base = perf_counter_ns(), event

    def _note(self, kind: RecordKind, subject: Any, detail: Any = None) -> None:
        if self._accelerator is not None:
            if self._accelerator.captures:
                return  # a graph is captured, whose replays are not seen
            self._events.append(self._accelerator.record_time())
        self._at.append(perf_counter_ns())
        self._kinds.append(kind)
        self._subjects.append(subject)
        self._details.append(detail)

    @property
    def log(self) -> Iterator[TimelineRecord]:
        """The entries in order."""
        events = self._events or repeat(None)
        return map(TimelineRecord, self._at, events, self._kinds, self._subjects, self._details)

    # moments

    def span_begins(self, span: Span) -> None:
        if not span.owners or span.owners[0] not in self.names:
            return
        running = self._running.setdefault(get_ident(), [])
        running.append(span)
        if span.beside:
            self._updating[span] = perf_counter_ns()
        elif not running[0].beside:  # two threads must not write to one log
            self._note(RecordKind.BEGIN, span)

    def span_ends(self, span: Span) -> None:
        running = self._running.get(get_ident())
        if not running or running[-1] is not span:
            return
        running.pop()
        if span.beside:
            self.updates.append(HostUpdate(span, self._updating.pop(span), perf_counter_ns()))
        elif not running or not running[0].beside:
            self._note(RecordKind.END, span)

    def computes(self, unit: Any, what: Computing) -> None:
        if unit in self.names:
            self._note(RecordKind.ENTER, unit, what)

    def computed(self, unit: Any, what: Computing) -> None:
        if unit in self.names:
            self._note(RecordKind.LEAVE, unit, what)

    def backward_over(self, unit: Any, phase: Phase) -> None:
        self.computed(unit, Computing.BACKWARD)

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        if unit in self.names:
            self._note(RecordKind.HOLD, unit, nbytes)

    def sharded(self, unit: Any, phase: Phase, nbytes: int) -> None:
        if unit in self.names:
            self._note(RecordKind.HOLD, unit, -nbytes)

    def issued(self, works: Sequence[Any]) -> None:
        running = self._running.get(get_ident())
        if running:
            span = running[-1]
            completed = self.completed.setdefault(span, [])
            called = [when_completed(work, lambda: completed.append(perf_counter_ns())) for work in works]
            self.works[span] = self.works.get(span, 0) + len(works)
            if not all(called):  # some works have no callback, so the end is unknown
                self.works[span] = -1

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        running = self._running.get(get_ident())
        if running:
            self.stream_ranges.append(StreamRange(running[-1], purpose, begin, end))

    # optimizers

    def follow_optimizers(self) -> None:
        """Records the steps of optimizers too, until `stop`."""
        for register, kind in (
            (register_optimizer_step_pre_hook, RecordKind.OPTIMIZE),
            (register_optimizer_step_post_hook, RecordKind.OPTIMIZED),
        ):
            self._hooks.callback(register(self._optimizer_hook(kind)).remove)

    def _optimizer_hook(self, kind: RecordKind) -> Callable[[Any, Any, Any], None]:
        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(span.kind is SpanKind.UPDATE for span in self._running.get(get_ident(), ())):
                return  # a step in the backward, whose span is recorded
            if any(
                id(param) in self._params for group in optimizer.param_groups for param in group["params"][:1]
            ):
                self._note(kind, None)

        return note

    def stop(self) -> None:
        """Removes the hooks of optimizers, and waits for the timing events."""
        self._hooks.close()
        if self._accelerator is not None:
            self._accelerator.record_time().synchronize()
            for stream_range in self.stream_ranges:
                stream_range.end.synchronize()

    def time_of(self, event: Any) -> int:
        """Returns the time of a timing event by the host's clock."""
        assert self.base is not None
        at, base = self.base
        milliseconds: float = base.elapsed_time(event)
        return at + round(milliseconds * 1e6)
