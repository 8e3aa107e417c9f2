"""`Recorder`: writes down what the runtime tells of its steps, with the time, and nothing else.

What it means is worked out afterwards (`assemble.py`), so that recording costs a step little.
"""

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
from fsdp_wrap._core import Computing, Span, SpanKind


class Mark(Enum):
    """What an entry of the log tells."""

    BEGIN = "begin"
    END = "end"
    ENTER = "enter"
    LEAVE = "leave"
    HOLD = "hold"
    OPTIMIZE = "optimize"
    OPTIMIZED = "optimized"


class Entry(NamedTuple):
    """One line of the log.

    Attributes:
        at: The host's clock, nanoseconds.
        event: A timing event on the current stream; None on a CPU.
        mark: What it tells.
        subject: The span, or the unit.
        detail: What a unit computes, or how many bytes more it holds.
    """

    at: int
    event: Any
    mark: Mark
    subject: Any
    detail: Any = None


class Lane(NamedTuple):
    """What a span has issued on an accelerator's stream, between two timing events."""

    span: Span
    purpose: str
    begin: Any
    end: Any


class Update(NamedTuple):
    """An update of a unit beside the backward, in a thread of its own, by the host's clock."""

    span: Span
    begin: int
    end: int


class Recorder:
    """A `StepWatcher` that keeps what concerns some units.

    Args:
        names: The units, and how to call them.
        params: Those of their modules: optimizers that step others are not recorded.
        accelerator: Where the units compute; None for the CPU.

    Attributes:
        completed: Of each span, when its works were complete.
        works: Of each span, of how many works that is told.
        lanes: What was issued on streams.
        updates: Of units, beside the backward.
        base: The host's clock and a timing event of the same moment; None for the CPU.
    """

    def __init__(
        self, names: Mapping[Any, str], params: Sequence[torch.Tensor], accelerator: Accelerator | None
    ) -> None:
        self.names = names
        self._params = {id(param) for param in params}
        # A list for each column, and not one of rows, each an object that the garbage collector would visit.
        self._at: list[int] = []
        self._events: list[Any] = []
        self._marks: list[Mark] = []
        self._subjects: list[Any] = []
        self._details: list[Any] = []
        self.completed: dict[Span, list[int]] = {}
        self.works: dict[Span, int] = {}
        self.lanes: list[Lane] = []
        self.updates: list[Update] = []
        self._updating: dict[Span, int] = {}  # those that are beside it now, and since when
        self._accelerator = accelerator
        self._running: dict[int, list[Span]] = {}  # by thread: those of one thread nest
        self._hooks = ExitStack()
        self.base: tuple[int, Any] | None = None
        if accelerator is not None:
            event = accelerator.record_time()
            event.synchronize()
            self.base = perf_counter_ns(), event

    def _note(self, mark: Mark, subject: Any, detail: Any = None) -> None:
        if self._accelerator is not None:
            if self._accelerator.captures:
                return  # into a graph: its replays tell nothing
            self._events.append(self._accelerator.record_time())
        self._at.append(perf_counter_ns())
        self._marks.append(mark)
        self._subjects.append(subject)
        self._details.append(detail)

    @property
    def log(self) -> Iterator[Entry]:
        """What was told, in order."""
        events = self._events or repeat(None)
        return map(Entry, self._at, events, self._marks, self._subjects, self._details)

    # as a StepWatcher

    def begin(self, span: Span) -> None:
        if not span.owners or span.owners[0] not in self.names:
            return
        running = self._running.setdefault(get_ident(), [])
        running.append(span)
        if span.beside:
            self._updating[span] = perf_counter_ns()
        elif not running[0].beside:  # two threads must not write to one log
            self._note(Mark.BEGIN, span)

    def end(self, span: Span) -> None:
        running = self._running.get(get_ident())
        if not running or running[-1] is not span:
            return
        running.pop()
        if span.beside:
            self.updates.append(Update(span, self._updating.pop(span), perf_counter_ns()))
        elif not running or not running[0].beside:
            self._note(Mark.END, span)

    def enter(self, owner: Any, unit: str, what: Computing) -> None:
        if owner in self.names:
            self._note(Mark.ENTER, owner, what)

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        if owner in self.names:
            self._note(Mark.LEAVE, owner, what)

    def hold(self, owner: Any, unit: str, nbytes: int) -> None:
        if owner in self.names:
            self._note(Mark.HOLD, owner, nbytes)

    def issued(self, works: Sequence[Any]) -> None:
        running = self._running.get(get_ident())
        if running:
            span = running[-1]
            completed = self.completed.setdefault(span, [])
            told = [when_completed(work, lambda: completed.append(perf_counter_ns())) for work in works]
            self.works[span] = self.works.get(span, 0) + len(works)
            if not all(told):  # of some nobody knows, so of all
                self.works[span] = -1

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        running = self._running.get(get_ident())
        if running:
            self.lanes.append(Lane(running[-1], purpose, begin, end))

    # optimizers

    def follow_optimizers(self) -> None:
        """Records the steps of optimizers as well, until `stop`."""
        for register, mark in (
            (register_optimizer_step_pre_hook, Mark.OPTIMIZE),
            (register_optimizer_step_post_hook, Mark.OPTIMIZED),
        ):
            self._hooks.callback(register(self._optimizer_hook(mark)).remove)

    def _optimizer_hook(self, mark: Mark) -> Callable[[Any, Any, Any], None]:
        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if any(each.kind is SpanKind.UPDATE for each in self._running.get(get_ident(), ())):
                return  # a step in the backward, which its span tells
            if any(
                id(param) in self._params for group in optimizer.param_groups for param in group["params"][:1]
            ):
                self._note(mark, None)

        return note

    def stop(self) -> None:
        """Ends what `follow_optimizers` began, and waits for what was measured on an accelerator."""
        self._hooks.close()
        if self._accelerator is not None:
            self._accelerator.record_time().synchronize()
            for lane in self.lanes:
                lane.end.synchronize()

    def time_of(self, event: Any) -> int:
        """Returns when a timing event has happened, by the host's clock."""
        assert self.base is not None
        at, base = self.base
        milliseconds: float = base.elapsed_time(event)
        return at + round(milliseconds * 1e6)
