"""Which ranks share a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from fsdp_wrap._comm import Note
from fsdp_wrap._core import Phase
from fsdp_wrap._runtime import Unit, communicators_of


def ranks_of(units: Sequence[Unit], note: Note, iteration: int) -> set[int]:
    """Returns the global ranks that share a model, directly or through other ranks; collective.

    Args:
        units: Its units.
        note: Names what is agreed on in messages.
        iteration: The iteration, for messages.
    """
    communicators = communicators_of(units)
    members = {dist.get_rank()}.union(*(communicator.members for communicator in communicators))
    for sharded in (sharded for unit in units for sharded in unit.params):
        parts = (part for part in sharded.distributed or () if part is not None)
        members.update(*(part.mesh.mesh.flatten().tolist() for part in parts))
    for communicator in communicators:
        if communicator.positions is not None and communicator.positions.agreement.store is not None:
            communicator.positions.issue(note, Phase.FORWARD, iteration)
            members.update(*communicator.all_gather_object(members))
    return members
