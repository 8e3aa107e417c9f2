"""Instructions from the leader of a round to the joined ranks: `Leader` sends them, `Follower` obeys."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from fsdp_wrap._by_hand import follow, sum_in_backward
from fsdp_wrap._core import Phase, PlugIn, Precedence, Span, SpanKind
from fsdp_wrap._runtime import Step, Unit
from fsdp_wrap._uneven.fates import follow_fates
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.units import sharded_params

_PHASES = list(Phase)
_LENGTH = 5  # of an order: what, model, unit, detail, iteration


class Instruction(IntEnum):
    """Kinds of instructions."""

    END_ROUND = 0
    GATHER = 1
    REDUCE = 2
    FINISH_REDUCTION = 3
    BEGIN_BACKWARD = 4
    END_BACKWARD = 5
    FOLLOW_FATES = 6


_OF_SPANS = {
    SpanKind.GATHER: Instruction.GATHER,
    SpanKind.REDUCE: Instruction.REDUCE,
    SpanKind.AWAIT_REDUCTION: Instruction.FINISH_REDUCTION,
}


class Leader(PlugIn):
    """Tells joined ranks each collective that this rank issues.

    Args:
        steps: The steps of the models, the same on all ranks.
        peers: The ranks of the models.

    Attributes:
        told: The ranks to tell; none if another rank leads, or all have batches.
    """

    order = Precedence.LEADER

    def __init__(self, steps: Sequence[Step], peers: Peers) -> None:
        self._steps, self._peers = steps, peers
        self._places = {
            unit: (model, index) for model, step in enumerate(steps) for index, unit in enumerate(step.units)
        }
        self.told: Sequence[int] = ()

    def tell(self, order: Instruction, model: int = 0, unit: int = 0, detail: int = 0) -> None:
        """Sends an order; `detail` is the index of a phase, or flags."""
        if self.told:
            self._peers.send([order, model, unit, detail, self._steps[model].iteration], self.told)

    def tell_fates(self, model: int, fates: Sequence[int]) -> None:
        """Tells what this rank's program has done with the gradients of a model."""
        self.tell(Instruction.FOLLOW_FATES, model, detail=len(fates))
        self._peers.send(fates, self.told)

    def begin_round(self, told: Sequence[int]) -> None:
        """Begins a round, of which some ranks have to be told."""
        self.told = told

    def end_round(self) -> None:
        """Tells the joined ranks that nothing follows before the next agreement."""
        if self.told:
            self.tell(Instruction.END_ROUND)
            self._peers.settle()
            self.told = ()

    def span_begins(self, span: Span) -> None:
        order = _OF_SPANS.get(span.kind)
        if order is None or (order is Instruction.GATHER and not span.nbytes):  # all is there
            return
        for unit in span.owners:
            if unit not in self._places:
                raise ValueError(
                    f"{unit.name} ({type(unit.module).__name__}) communicates inside uneven() or Join, and "
                    "ranks without a batch would not know of it: pass all models that are used inside"
                )
            self.tell(order, *self._places[unit], 0 if span.phase is None else span.phase.index)


class Follower:
    """Issues the collectives of a leader without a batch: gathers for the others, and reductions of zeros.

    It holds the full parameters of two units at most.
    """

    def __init__(self, steps: Sequence[Step], peers: Peers) -> None:
        self._steps, self._peers = steps, peers
        self._units = [step.units for step in steps]
        self._gathered: tuple[Unit, Phase] | None = None
        self._leader, self._ended = 0, True

    @torch.no_grad()
    def follow(self, leader: int) -> None:
        """Follows a rank to the end of its round."""
        for step in self._steps:
            follow(step)
        self._leader, self._ended = leader, False
        while not self._ended:
            self._obey(*self._receive())

    def skip(self) -> None:
        """Reads the rest of a round that failed: orders that nobody reads would come in a later round."""
        while not self._ended:
            order, _, _, detail, _ = self._receive()
            if order == Instruction.FOLLOW_FATES:
                self._peers.receive(detail, self._leader)

    def _receive(self) -> list[int]:
        order = self._peers.receive(_LENGTH, self._leader)
        self._ended = order[0] == Instruction.END_ROUND
        return order

    def _obey(self, order: int, model: int, index: int, detail: int, iteration: int) -> None:
        step, unit = self._steps[model], self._units[model][index]
        step.iteration = iteration
        if order == Instruction.GATHER:
            self._gather(unit, _PHASES[detail])
            return
        self._drop_gathered()
        if order == Instruction.REDUCE:
            step.queue.reduce_alone(unit, _PHASES[detail])
        elif order == Instruction.FINISH_REDUCTION:
            step.queue.finish_reduction_of(unit)
        elif order == Instruction.BEGIN_BACKWARD:
            sum_in_backward(step, bool(detail & 2), bool(detail & 1))
            step.begin_backward()
        elif order == Instruction.END_BACKWARD:
            step.close_backward(bool(detail))
        elif order == Instruction.FOLLOW_FATES:
            follow_fates(sharded_params(step.units), self._peers.receive(detail, self._leader))

    def _gather(self, unit: Unit, phase: Phase) -> None:
        if self._gathered is not None and self._gathered[0] is unit:
            self._drop_gathered()
        unit.gather(phase)
        self._drop_gathered()
        self._gathered = unit, phase
        if unit.buffers.staged:  # its second stage is not to wait for an order
            self._drop_gathered()

    def _drop_gathered(self) -> None:
        """Ends the gather before: this rank does not compute with it."""
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            gathered[0].unshard(gathered[1])
            gathered[0].reshard(gathered[1])
