"""`Council`: the ranks that compute with a model tell each other what they have found."""

from __future__ import annotations

from collections.abc import Iterator
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
from fsdp_wrap._params import LocalPart
from fsdp_wrap._runtime import Schedule, communicators_of

T = TypeVar("T")

_MEMBERS, _FLAGS = Note("agrees on the ranks of a model"), Note("agrees on non-finite values")


class Council:
    """The ranks of one model's tree of units; made by all of them."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        members = sorted(_members(schedule))
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


def _parts(schedule: Schedule) -> Iterator[LocalPart]:
    """Yields the parts of parameters that tensor or expert parallelism has distributed."""
    for unit in schedule.units:
        for layout in () if unit.handle is None else unit.handle.layouts:
            yield from (part for part in layout.distributed or () if part is not None)


def _members(schedule: Schedule) -> set[int]:
    """Returns the ranks of a model, also those that this one meets by way of others; collective."""
    members = {dist.get_rank()}
    ways = dict.fromkeys(each for unit in schedule.units for each in communicators_of(unit))
    members.update(*(each.members for each in ways))
    members.update(*(part.mesh.mesh.flatten().tolist() for part in _parts(schedule)))
    for each in ways:
        if each.positions is not None and each.positions.agreement.store is not None:
            each.positions.issue(_MEMBERS, Phase.IDLE, schedule.iteration)
            members.update(*each.all_gather_object(members))
    return members
