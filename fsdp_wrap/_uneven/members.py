"""The ranks that compute with a model: over how many its units shard, replicate, and are distributed."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_wrap._by_hand import ranks_of
from fsdp_wrap._comm import Note
from fsdp_wrap._params import LocalPart
from fsdp_wrap._runtime import Step
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.planned import peers_over

_NOTE = Note("agrees on the ranks of a model")
_known: MutableMapping[Step, Peers] = WeakKeyDictionary()


def peers_of(schedules: Sequence[Step]) -> Peers:
    """Returns the ranks that compute with some models; collective at first."""
    first = _peers(schedules[0])
    for schedule in schedules[1:]:
        if _peers(schedule).members != first.members:
            raise ValueError(
                f"{schedule.root.name} computes on ranks {_peers(schedule).members}, and "
                f"{schedules[0].root.name} on ranks {first.members}: use one uneven() for each"
            )
        first.together |= _peers(schedule).together
    return first


def _peers(schedule: Step) -> Peers:
    known = _known.get(schedule)
    if known is None or not known.lives:
        known = _known[schedule] = peers_over(ranks_of(schedule.units, _NOTE, schedule.iteration))
        known.together = {*known.share(_companions(schedule)).values()}
    return known


def _parts(schedule: Step) -> Iterator[LocalPart]:
    """Returns the parts of parameters that tensor or expert parallelism has distributed."""
    for unit in schedule.units:
        for sharded in unit.params:
            yield from (part for part in sharded.distributed or () if part is not None)


def _companions(schedule: Step) -> frozenset[int]:
    """Returns the ranks whose forwards need this one's: those that hold other parts of its parameters."""
    ranks = {dist.get_rank()}
    for part in _parts(schedule):
        here = part.mesh.get_coordinate() or ()
        index = tuple(place if dim in part.own else slice(None) for dim, place in enumerate(here))
        ranks.update(part.mesh.mesh[index].flatten().tolist())
    return frozenset(ranks)
