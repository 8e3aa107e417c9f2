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


def peers_of(steps: Sequence[Step]) -> Peers:
    """Returns the ranks that compute with some models; collective at first."""
    first = _peers(steps[0])
    for step in steps[1:]:
        if _peers(step).members != first.members:
            raise ValueError(
                f"{step.root.name} computes on ranks {_peers(step).members}, and "
                f"{steps[0].root.name} on ranks {first.members}: use one uneven() for each"
            )
        first.together |= _peers(step).together
    return first


def _peers(step: Step) -> Peers:
    known = _known.get(step)
    if known is None or not known.lives:
        known = _known[step] = peers_over(ranks_of(step.units, _NOTE, step.iteration))
        known.together = {*known.share(_companions(step)).values()}
    return known


def _parts(step: Step) -> Iterator[LocalPart]:
    """Returns the parts of parameters that tensor or expert parallelism has distributed."""
    for unit in step.units:
        for sharded in unit.params:
            yield from (part for part in sharded.distributed or () if part is not None)


def _companions(step: Step) -> frozenset[int]:
    """Returns the ranks whose forwards need this one's: those that hold other parts of its parameters."""
    ranks = {dist.get_rank()}
    for part in _parts(step):
        here = part.mesh.get_coordinate() or ()
        index = tuple(place if dim in part.own else slice(None) for dim, place in enumerate(here))
        ranks.update(part.mesh.mesh[index].flatten().tolist())
    return frozenset(ranks)
