"""`Council`: the ranks that compute with a model tell each other what they have found."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_wrap._by_hand import ranks_of
from fsdp_wrap._comm import (
    CARRY_NOTHING,
    Communicator,
    Note,
    host_group_over,
    make_communicator,
    ranks_in,
)
from fsdp_wrap._core import Phase
from fsdp_wrap._runtime import Step

T = TypeVar("T")

_MEMBERS, _FLAGS = Note("agrees on the ranks of a model"), Note("agrees on values")


def all_here(step: Step) -> bool:
    """Whether all ranks come to this place: not where some have run out of batches (`uneven`, `Join`)."""
    return not step.plug_ins.separate


def all_begin(step: Step) -> bool:
    """Whether all ranks run the outermost forward that begins: one may evaluate alone if it holds all."""
    gathers = any(unit.buffers.communicator.size > 1 for unit in step.units)
    needs_all = torch.is_grad_enabled() or gathers
    return needs_all and all_here(step)


class Council:
    """The ranks of one model's tree of units; made by all of them.

    Attributes:
        members: Their global ranks.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.members = sorted(ranks_of(step.units, _MEMBERS, step.iteration))
        self._communicator: Communicator | None = None
        if len(self.members) > 1:
            group = host_group_over(self.members)
            if dist.get_backend(group) not in CARRY_NOTHING:
                self._communicator = make_communicator(ranks_in(group), torch.device("cpu"))

    def share(self, own: T | None) -> list[T]:
        """Returns what the ranks report; empty if none reports anything. Collective."""
        flags = torch.tensor([float(own is not None)], device="cpu")
        self.add(flags)
        if not flags.item():
            return []
        return [told for told in self.gather(own) if told is not None]

    def add(self, numbers: torch.Tensor) -> None:
        """Replaces numbers in host memory by their sums over the ranks. Collective."""
        if self._communicator is not None:
            self._note(self._communicator)
            self._communicator.all_reduce([numbers]).wait()

    def gather(self, own: T) -> list[T]:
        """Returns what each rank has, in their order. Collective."""
        if self._communicator is None:
            return [own]
        self._note(self._communicator)
        return self._communicator.all_gather_object(own)

    def _note(self, ranks: Communicator) -> None:
        if ranks.positions is not None:
            ranks.positions.issue(_FLAGS, Phase.IDLE, self._step.iteration)
