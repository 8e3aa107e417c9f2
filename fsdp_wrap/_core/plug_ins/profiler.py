"""Units as ranges of `torch.profiler`."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import torch

from fsdp_wrap._core.plug_ins.kinds import Computing, Phase
from fsdp_wrap._core.plug_ins.plug_in import PlugIn, Precedence, Span, everywhere
from fsdp_wrap._core.torch_private import profiler_runs


class _Range(NamedTuple):
    """An open range of `torch.profiler`."""

    what: Any  # the span, or (unit, Computing)
    unit: str
    range: Any


class ProfilerRanges(PlugIn):
    """Shows units as ranges of `torch.profiler`: "fsdp_wrap: backward blocks.3"."""

    order = Precedence.RANGES

    def __init__(self) -> None:
        self._open: dict[int, list[_Range]] = {}  # by thread

    def _begin(self, what: Any, unit: str, name: str) -> None:
        opened = torch.profiler.record_function(f"fsdp_wrap: {name} {unit or '(root)'}")
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.setdefault(get_ident(), []).append(_Range(what, unit, opened))

    def _end(self, what: Any) -> None:
        """Ends a range, and its inner ranges, if it is open in this thread."""
        ranges = self._open.get(get_ident(), [])
        if any(opened.what == what for opened in ranges):
            self._end_while(lambda opened: opened.what != what)
            ranges.pop().range.__exit__(None, None, None)

    def _end_while(self, unwanted: Callable[[_Range], bool]) -> None:
        ranges = self._open.get(get_ident(), [])
        while ranges and unwanted(ranges[-1]):
            ranges.pop().range.__exit__(None, None, None)

    def span_begins(self, span: Span) -> None:
        self._begin(span, span.unit, span.kind.value)

    def span_ends(self, span: Span) -> None:
        self._end(span)

    def computes(self, unit: Any, what: Computing) -> None:
        if what is Computing.BACKWARD:  # the one before may not have ended
            self._end_while(lambda opened: not encloses(opened.unit, unit.fqn) and opened.what[1] is what)
        self._begin((unit, what), unit.fqn, what.value)

    def computed(self, unit: Any, what: Computing) -> None:
        self._end((unit, what))

    def backward_over(self, unit: Any, phase: Phase) -> None:
        self._end((unit, Computing.BACKWARD))

    def close(self) -> None:
        """Ends the open ranges of this thread; a failed backward may have left some."""
        self._end_while(lambda _: True)


def encloses(outer: str, inner: str) -> bool:
    """Whether a unit encloses another one, by their names."""
    return not outer or inner.startswith(f"{outer}.")


class _Following(PlugIn):
    """Attaches the ranges while the profiler runs."""

    order = Precedence.RANGES

    def __init__(self) -> None:
        self._ranges = ProfilerRanges()

    def forward_begins(self, step: Any) -> None:
        active = profiler_runs()
        if active != (self._ranges in everywhere.attached):
            self._ranges.close()
            (everywhere.attach if active else everywhere.detach)(self._ranges)


everywhere.attach(_Following())
