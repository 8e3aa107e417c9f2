"""The execution order of units: predicts prefetches and batches, and is checked in debug level DETAIL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Note
from fsdp_wrap._core import Computing, Phase, PlugIn, Precedence, warn_caller
from fsdp_wrap._params import ParamHandle
from fsdp_wrap._runtime.unit import Unit

_FAR = 128
"""Number of coming units that are looked at for a batch of collectives."""


class ExecOrder:
    """Records the order of units in the last forward and backward, to predict the next ones.

    The order of starts predicts the next forward, the order of ends the backward. A unit that ran several
    times stands there several times. A wrong guess only costs time, so nothing here needs to be exact.

    Attributes:
        started: Units by the start of their forwards; appended to by callers.
        ended: Units by the end of their forwards; appended to by callers.
        reduced: Units by the reduction of their gradients in the last backward; appended to by callers.
    """

    def __init__(self) -> None:
        self.ended: list[Unit] = []
        self.started: list[Unit] = []
        self.reduced: list[Unit] = []
        self._started_before: list[Unit] = []
        self._reduced_before: dict[Unit, list[Unit]] = {}  # by the first unit
        self._cursor = 0

    def copy(self) -> ExecOrder:
        """Returns a copy, which later records do not change."""
        copy = ExecOrder()
        copy.restore(self)
        return copy

    def restore(self, other: ExecOrder) -> None:
        """Replaces the records by those of another order."""
        self.ended, self.started, self.reduced = [*other.ended], [*other.started], [*other.reduced]
        self._started_before = [*other._started_before]
        self._reduced_before, self._cursor = {**other._reduced_before}, other._cursor

    def begin_forward(self) -> None:
        """Starts a new record."""
        self.ended = []
        self._started_before, self.started = self.started, []

    def next_in_forward(self) -> Unit | None:
        """Returns the unit that followed the last started one in the last iteration."""
        return next(iter(_coming(self.started, self._started_before)), None)

    def begin_backward(self) -> None:
        """Moves the cursor of `next_in_backward` to the end of the forward; starts recording reductions."""
        self._cursor = len(self.ended)
        if self.reduced:
            self._reduced_before[self.reduced[0]] = self.reduced
            self.reduced = []

    def next_in_backward(self, unit: Unit, moves: bool = True) -> Unit | None:
        """Returns the unit whose backward is expected to follow that of `unit`; moves the cursor, or not."""
        for index in range(self._cursor - 1, -1, -1):
            if self.ended[index] is unit:
                self._cursor = index if moves else self._cursor
                return self.ended[index - 1] if index > 0 else None
        return None

    # units expected after a unit: none in the first iteration

    def coming_in_forward(self, unit: Unit) -> list[Unit]:
        """Returns the units that followed `unit` in the last forward, if this one has gone alike so far."""
        found = _coming(self.started, self._started_before)
        return found[1:] if found and found[0] is unit else []

    def coming_in_backward(self, unit: Unit) -> list[Unit]:
        """Returns the units whose backwards are expected to follow that of `unit`."""
        for index in range(self._cursor - 1, -1, -1) if self._started_before else ():
            if self.ended[index] is unit:
                return self.ended[max(0, index - _FAR) : index][::-1]
        return []

    def coming_to_reduce(self) -> list[Unit]:
        """Returns the units whose gradients came next last time, if this backward has gone alike so far."""
        return _coming(self.reduced, self._reduced_before.get(self.reduced[0], []))


def _coming(now: list[Unit], before: list[Unit]) -> list[Unit]:
    """Returns the units that came next last time, if this time the last one was the same."""
    place = len(now)
    alike = place <= len(before) and (not place or before[place - 1] is now[-1])
    return before[place : place + _FAR] if alike else []


class OrderCheck(PlugIn):
    """Compares the forward order across ranks in debug level DETAIL, in forwards that train."""

    order = Precedence.CHECKS

    def __init__(self) -> None:
        self._comparison = _OrderComparison()

    def forward_begins(self, step: Any) -> None:
        detail = dist.get_debug_level() == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
        if self._comparison in step.plug_ins.attached:  # no backward has followed
            step.plug_ins.detach(self._comparison)
        if detail and torch.is_grad_enabled() and step.root.trains and not step.plug_ins.align:
            self._comparison.begin(step.iteration)
            step.plug_ins.attach(self._comparison)


class _OrderComparison(PlugIn):
    """Compares the units of a forward: in the first iteration across ranks, later with the first.

    The first iteration issues a collective before each unit. It ends with the first backward.
    """

    order = Precedence.CHECKS

    def __init__(self) -> None:
        self._first: list[str] | None = None
        self._order: list[str] = []
        self._iteration = 0
        self._warned = False

    def begin(self, iteration: int) -> None:
        """Begins an outermost forward."""
        self._order, self._iteration = [], iteration

    def enters(self, unit: Unit, what: Computing) -> None:
        if what is not Computing.FORWARD:
            return
        if self._first is None:
            _compare_across_ranks(unit.name, unit.handle, self._iteration)
        else:
            self._compare_with_first(unit.name)
        self._order.append(unit.name)

    def backward_opens(self, step: Any) -> None:
        if self._first is None:
            self._first = self._order
        else:
            self._compare_with_first(None)
        step.plug_ins.detach(self)

    def _compare_with_first(self, name: str | None) -> None:
        assert self._first is not None
        expected = next(iter(self._first[len(self._order) :]), None)
        if name == expected or self._warned:
            return
        self._warned = True
        warn_caller(
            "Forward order differs from that of the first iteration: "
            f"expected {expected or 'its end'}, got {name or 'its end'} (rank {dist.get_rank()}, iteration "
            f"{self._iteration}). Where all ranks changed alike, prefetching may be less useful; where only "
            "some did, their collectives no longer fit together, and the step fails"
        )


_EXCHANGE = Note("compares the forward order")


def _compare_across_ranks(name: str, handle: ParamHandle, iteration: int) -> None:
    running = {dist.get_rank(): name}
    for communicator in (handle.communicator, handle.replicas):
        if communicator.positions is not None:
            communicator.positions.issue(_EXCHANGE, Phase.FORWARD, iteration)
            for told in communicator.all_gather_object(running):
                running.update(told)
    if len(set(running.values())) > 1:
        raise RuntimeError(
            "Forward order differs across ranks: "
            + ", ".join(f"rank {rank} runs {unit}" for rank, unit in sorted(running.items()))
            + ". All ranks must run the same units in the same order"
        )
