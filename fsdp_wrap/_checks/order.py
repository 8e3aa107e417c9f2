"""`OrderCheck`: compares the order of units in a forward, in debug level DETAIL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Note
from fsdp_wrap._core import Computing, Phase, PlugIn, Precedence, warn_caller
from fsdp_wrap._params import Buffers
from fsdp_wrap._runtime import Unit


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
            _compare_across_ranks(unit.name, unit.buffers, self._iteration)
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


def _compare_across_ranks(name: str, buffers: Buffers, iteration: int) -> None:
    running = {dist.get_rank(): name}
    for communicator in (buffers.communicator, buffers.replicas):
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
