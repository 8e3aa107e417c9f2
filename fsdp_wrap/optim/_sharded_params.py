"""`ShardedParam`: a parameter and the boxes of it that this rank has, whichever way it is sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_wrap._comm import (
    Communicator,
    all_gather_object,
    device_of,
    group_over,
    make_communicator,
    ranks_in,
)
from fsdp_wrap._core import Place, named, params, refuse_as
from fsdp_wrap._core.torch_private import StridedShard
from fsdp_wrap._params import FlatParameter, FlatPiece, boxes_of, to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state import Original, is_state_offloaded, offload_optimizer_state, owned_places
from fsdp_wrap.optim._views import Block


@dataclass(frozen=True)
class LocalBox:
    """A box of a parameter, contiguous in the rank's local elements, in which it begins at `begin`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Overlap:
    """The overlap of a matrix with a local box."""

    part: LocalBox
    within: tuple[slice, ...]  # in the part
    place: tuple[slice, ...]  # in the matrix, as a box of the parameter
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return torch.Size(self.sizes).numel()

    def of_held(self, held: torch.Tensor) -> torch.Tensor:
        """Returns the overlap as a view of the rank's flattened local part."""
        part = self.part
        return held.narrow(0, part.begin, torch.Size(part.sizes).numel()).view(part.sizes)[self.within]


def overlaps(parts: Iterable[LocalBox], block: Block) -> list[Overlap]:
    """Returns the overlaps of a matrix with boxes of its parameter."""
    result = []
    for part in parts:
        starts = [*map(max, part.offsets, block.offsets)]
        ends = [
            min(offset + size, first + length)
            for offset, size, first, length in zip(part.offsets, part.sizes, block.offsets, block.sizes)
        ]
        if all(start < end for start, end in zip(starts, ends)):
            within = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, part.offsets))
            place = tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, block.offsets))
            result.append(Overlap(part, within, place, tuple(e - s for s, e in zip(starts, ends))))
    return result


@dataclass(frozen=True)
class ShardedParam:
    """A parameter as an optimizer holds it (`param`), and the boxes of it that this rank has."""

    fqn: str  # in the unwrapped module, the first of its `names`
    names: tuple[str, ...]
    shape: torch.Size  # of the whole parameter
    param: nn.Parameter
    parts: tuple[LocalBox, ...]
    embeds: bool = False  # whether an embedding looks up rows of it
    original: Original | None = None  # in a wrapper's unit

    @property
    def copy(self) -> Any:
        """Mesh coordinates, or ranks, that identify this rank's replica; None if unknown."""
        if isinstance(self.param, DTensor):
            here = self.param.device_mesh.get_coordinate() or ()
            return [at for at, placement in zip(here, self.param.placements) if placement.is_replicate()]
        buffers = None if self.original is None else self.original.buffers
        return None if buffers is None else sorted(buffers.communicator.members)

    @property
    def device(self) -> torch.device:
        """The device of its computations."""
        buffers = None if self.original is None else self.original.buffers
        return self.param.device if buffers is None else buffers.communicator.device


def sharded_params_in(model: nn.Module) -> list[ShardedParam]:
    """Returns the parameters of a model in order, each once, as an optimizer of this library holds them.

    A `FlatParameter` is held by pieces: one for each original parameter.
    """
    flat = [unit for unit in units_in(model).values() if unit.params and not _of_dtensors(unit)]
    owned = owned_places(flat)
    by_key: dict[object, tuple[list[str], list[Place], Any]] = {}
    for fqn, place, param in named(model, params, all_names=True):
        original = owned.get(place)
        if original is None and (param is None or isinstance(param, FlatParameter)):
            continue
        key = id(param) if original is None else original.key
        names, places, _ = by_key.setdefault(key, ([], [], original or param))
        names.append(fqn)
        places.append(place)
    return [_sharded_param(names, places, source) for names, places, source in by_key.values()]


def _of_dtensors(unit: Any) -> bool:
    return any(isinstance(source, DTensor) for sharded in unit.buffers.params for source in sharded.sources)


def _sharded_param(names: Sequence[str], places: Iterable[Place], source: Any) -> ShardedParam:
    embeds = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module, _ in places)
    fqn, every = names[0], tuple(dict.fromkeys(names))
    if not isinstance(source, Original):
        return ShardedParam(fqn, every, source.shape, source, _boxes_of(fqn, source), embeds)
    interval = source.interval
    begins, sizes = (0,) * len(interval.shape), tuple(interval.shape)
    if interval.part is not None:
        begins, sizes = interval.part.box
    parts = tuple(
        LocalBox(tuple(map(sum, zip(begins, box.offsets))), box.sizes, box.first - interval.start)
        for box in boxes_of(sizes, interval.start, interval.stop)
        if box.numel
    )
    param: nn.Parameter = interval.source
    if isinstance(param, FlatParameter):
        flat, param = param, FlatPiece(param, interval)
        refuse_as(param, flat)
        if is_state_offloaded(flat):
            offload_optimizer_state([param])
    return ShardedParam(fqn, every, source.shape, param, parts, embeds, source)


def _boxes_of(fqn: str, param: torch.Tensor) -> tuple[LocalBox, ...]:
    """Returns this rank's boxes of a parameter that is in no wrapper's unit."""
    offsets, sizes = [0] * param.dim(), [*param.shape]
    if isinstance(param, DTensor):
        for dim, place, count in _cuts(fqn, param):
            length = -(-sizes[dim] // count)
            first = min(place * length, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + first, min(length, sizes[dim] - first)
        if param._local_tensor.shape != torch.Size(sizes):
            raise ValueError(
                f"parameter '{fqn}' is a DTensor with placements {param.placements}, of which rank "
                f"{dist.get_rank()} has {tuple(param._local_tensor.shape)}, not {tuple(sizes)}: distribute "
                "it as torch.distributed.tensor.distribute_tensor does"
            )
    return (LocalBox(tuple(offsets), tuple(sizes), 0),) if torch.Size(sizes).numel() else ()


def _cuts(fqn: str, param: DTensor) -> Iterator[tuple[int, int, int]]:
    """Yields, in order, each cut's dimension, this rank's index, and the number of pieces."""
    mesh = param.device_mesh
    here = [*zip(param.placements, mesh.get_coordinate() or (), mesh.shape)]
    here.sort(key=lambda cut: isinstance(cut[0], StridedShard))  # these cut what others have cut
    for placement, place, count in here:
        if isinstance(placement, (Shard, StridedShard)):
            yield placement.dim, place, count
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"parameter '{fqn}' is a DTensor with placements {param.placements}; only Shard and "
                "Replicate tell which rank has what: redistribute it"
            )


class Communicators:
    """Communicators of the ranks over which parameters are sharded, made once each."""

    def __init__(self) -> None:
        self._known: dict[Any, Communicator] = {}

    def of(self, held: ShardedParam) -> Communicator:
        """Returns the communicator of all ranks that hold any of a parameter; collective among them."""
        if isinstance(held.param, DTensor):
            ranks = sorted(held.param.device_mesh.mesh.flatten().tolist())
            return self._over(tuple(ranks), device_of(held.param.device_mesh))
        buffers = None if held.original is None else held.original.buffers
        if buffers is None:
            return self._over(None, held.device)
        part = held.original.interval.part if held.original is not None else None
        axes = [axis for axis in (buffers.communicator, buffers.replicas) if axis.size > 1]
        groups = [] if part is None else [*map(part.mesh.get_group, range(part.mesh.ndim))]
        if len(axes) == 1 and not groups:
            return axes[0]
        key = (*axes, *groups)
        if key not in self._known:
            self._known[key] = self._over(_reached(axes, groups), held.device)
        return self._known[key]

    def _over(self, ranks: tuple[int, ...] | None, device: torch.device) -> Communicator:
        key = ranks, device
        if key not in self._known:
            together = ranks is not None and len(ranks) > 1
            members = ranks_in(group_over(ranks or (), device)) if together else None
            made: Communicator = make_communicator(members, device)
            self._known[key] = made
        return self._known[key]


def _reached(axes: Sequence[Communicator], groups: Iterable[dist.ProcessGroup]) -> tuple[int, ...]:
    """Returns the ranks that this one reaches by going along each of several dimensions; collective."""
    known = {dist.get_rank()} if dist.is_initialized() else {0}
    for axis in axes:
        known = {*itertools.chain.from_iterable(axis.all_gather_object(known))}
    for group in groups:
        known = {*itertools.chain.from_iterable(all_gather_object(known, group))}
    return tuple(sorted(known))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's local part of a tensor, flattened."""
    return to_local(tensor.detach()).reshape(-1)
