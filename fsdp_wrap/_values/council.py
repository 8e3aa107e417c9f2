"""`Council`: the ranks that compute with a model tell each other what they have found."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_wrap._comm import (
    CARRY_NOTHING,
    Communicator,
    Note,
    host_group_over,
    make_communicator,
    ranks_in,
)
from fsdp_wrap._core import Phase
from fsdp_wrap._runtime import Schedule, ranks_of

T = TypeVar("T")

_MEMBERS, _FLAGS = Note("agrees on the ranks of a model"), Note("agrees on non-finite values")


class Council:
    """The ranks of one model's tree of units; made by all of them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        members = sorted(ranks_of(schedule.units, _MEMBERS, schedule.iteration))
        self._communicator: Communicator | None = None
        if len(members) > 1:
            group = host_group_over(members)
            if dist.get_backend(group) not in CARRY_NOTHING:
                self._communicator = make_communicator(ranks_in(group), torch.device("cpu"))

    def share(self, own: T | None) -> list[T]:
        """Returns what ranks have to tell; empty if none has anything. Collective."""
        ranks = self._communicator
        if ranks is None:
            return [] if own is None else [own]
        if ranks.positions is not None:
            ranks.positions.issue(_FLAGS, Phase.IDLE, self._schedule.iteration)
        flags = torch.tensor([float(own is not None)], device="cpu")
        ranks.all_reduce([flags]).wait()
        if not flags.item():
            return []
        return [each for each in ranks.all_gather_object(own) if each is not None]
