"""Names and pieces of a model: its units, and their parameters and gradients as pieces of flattened tensors.

`name` is that of the unit, with which the names begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import refuse_unsharded
from fsdp_wrap._core import encloses, joined
from fsdp_wrap._params import Cut, FlatPiece, ShardedParams, holds_codes, to_local
from fsdp_wrap._runtime import Unit, units_in


class Piece(NamedTuple):
    """A contiguous piece of a flattened parameter, or of what has its shape; or an activation.

    Attributes:
        fqn: Name of the parameter; "" for an activation or its gradient.
        shape: Shape of what is sharded: the parameter, or its part under tensor parallelism.
        start: Index of the piece's first element.
        data: The piece.
    """

    fqn: str
    shape: torch.Size
    start: int
    data: torch.Tensor


def activations(tensors: Iterable[torch.Tensor | None]) -> Iterator[Piece]:
    """Yields the pieces of activations, or of their gradients."""
    return (Piece("", to_local(tensor).shape, 0, tensor) for tensor in tensors if tensor is not None)


def whole(fqn: str, tensor: torch.Tensor) -> Piece:
    """Returns all of a parameter, or of what has its shape, as one piece."""
    local = to_local(tensor).detach()  # a `DTensor` cannot be detached in inference mode
    return Piece(fqn, local.shape, 0, local)


# names


def whole_name(unit: str, fqn: str) -> str:
    """Returns a parameter's name; the mesh that may follow a unit's name is no part of it."""
    return joined(unit.partition(" ")[0], fqn)


def innermost(units: Iterable[str], name: str) -> str | None:
    """Returns the innermost unit that is or encloses what has this name; None if there is none."""
    return max((unit for unit in units if unit == name or encloses(unit, name)), key=len, default=None)


def first_names(model: nn.Module) -> dict[Unit, str]:
    """Returns a model's units by name: that of several modules by its first one."""
    names: dict[Unit, str] = {}
    for name, unit in units_in(model).items():
        names.setdefault(unit, name)
    return names


def idle_units(model: nn.Module, asking: str) -> dict[Unit, str]:
    """Returns a model's units by name; `asking` is refused inside a step, and of a model without units."""
    names = first_names(model)
    if not names:
        refuse_unsharded(model, asking)
    require_idle(names, asking)
    return names


def full_params(unit: Unit, name: str) -> Iterator[Piece]:
    """Yields the full parameters that a unit's modules show."""
    for segment in unit.segments:
        for fqn, leaf in (
            [] if holds_codes(segment.params.side_data) else zip(segment.layout.fqns, segment.leaves)
        ):
            yield whole(whole_name(name, fqn), leaf)


def own_gradients(unit: Unit, name: str) -> Iterator[Piece]:
    """Yields the gradients on a unit's leaves, or in their place."""
    for segment in unit.segments:
        gradients, layout = segment.gradients, segment.layout
        for index, (fqn, leaf) in enumerate(zip(layout.fqns, segment.leaves)):
            if leaf.grad is not None:
                yield whole(whole_name(name, fqn), leaf.grad)
            elif gradients.used[index] and gradients.taken is segment.full:
                yield whole(whole_name(name, fqn), layout.views(segment.full.data)[index])


def shard_pieces(unit: Unit, name: str, params: Collection[ShardedParams] | None = None) -> Iterator[Piece]:
    """Yields this rank's pieces of a unit's parameters, or some of them, in master dtype.

    Tensor subclasses and codes are no plain numbers: they have no pieces.
    """
    for sharded in unit.params if params is None else params:
        if not sharded.extended and not holds_codes(sharded.side_data):
            yield from pieces_of(unit, name, sharded, sharded.flat_param.detach())


def pieces_of(unit: Unit, name: str, sharded: ShardedParams, shard: torch.Tensor) -> Iterator[Piece]:
    """Yields the pieces of a tensor like a segment's shard, such as a reduced gradient."""
    return _named(unit, name, sharded, sharded.layout.pieces(shard.detach()))


def step_pieces(unit: Unit, name: str, held: Set[object]) -> Iterator[Piece]:
    """Yields the pieces of the gradients of the parameters with these keys, as an optimizer sees them."""
    for sharded in unit.params:
        grads = [
            source.grad if not held.isdisjoint(keys_of(source, fqn)) else None
            for source, fqn in zip(sharded.sources, sharded.layout.fqns)
        ]
        own: list[torch.Tensor | None] = [None if grad is None else to_local(grad) for grad in grads]
        if not isinstance(sharded.layout.extents[0], Cut):
            own = [
                local if local is None or isinstance(grad, DTensor) else interval.within(local)
                for interval, local, grad in zip(sharded.intervals(), own, grads)
            ]
        yield from _named(unit, name, sharded, own)


def key_of(param: nn.Parameter) -> object:
    """Returns a key that identifies a parameter of an optimizer, or a piece of a FlatParameter."""
    return (id(param.flat), param.fqn) if isinstance(param, FlatPiece) else id(param)


def keys_of(source: nn.Parameter, fqn: str) -> tuple[object, object]:
    """Returns the keys of a sharded parameter, and of the piece of it that has this name in the unit."""
    return id(source), (id(source), fqn)


def _named(
    unit: Unit, name: str, sharded: ShardedParams, own: Sequence[torch.Tensor | None]
) -> Iterator[Piece]:
    """Yields the pieces of tensors `own`, one for each parameter of a segment; skips None."""
    cuts = [extent for extent in sharded.layout.extents if isinstance(extent, Cut)]
    for interval, data in zip(() if cuts else sharded.intervals(), own):
        if data is not None:
            yield Piece(whole_name(name, interval.fqn), interval.held_shape, interval.start, data.reshape(-1))
    for cut, data in zip(cuts, own):
        if data is not None and data.numel():
            yield from _runs(cut, unit.buffers.communicator.rank, whole_name(name, cut.fqn), data)


def _runs(cut: Cut, rank: int, fqn: str, data: torch.Tensor) -> Iterator[Piece]:
    """Yields the contiguous pieces of a rank's chunk of a parameter that is cut along any dimension."""
    inner = cut.shape[cut.dim + 1 :].numel()
    length, first = cut.rows(rank) * inner, cut.first_row(rank) * inner
    for number, run in enumerate(data.reshape(-1, length)):
        yield Piece(fqn, cut.shape, number * cut.shape[cut.dim] * inner + first, run)
