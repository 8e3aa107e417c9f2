"""Tensors of a unit by name: its full parameters, its gradients, and pieces of shards.

`name` is that of the unit, with which the names begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import joined
from fsdp_wrap._params import Cut, FlatPiece, Layout, to_local
from fsdp_wrap._runtime import Unit, refuse_unsharded, schedule_of, units_in


class Piece(NamedTuple):
    """A contiguous piece, 1-D, of a flattened parameter, or of what has its shape.

    Attributes:
        fqn: Name of the parameter.
        shape: Shape of what is sharded: the parameter, or its part under tensor parallelism.
        start: Index of the piece's first element.
        data: The piece.
    """

    fqn: str
    shape: torch.Size
    start: int
    data: torch.Tensor


def whole_name(unit: str, fqn: str) -> str:
    """Returns a parameter's name; the mesh that may follow a unit's name is no part of it."""
    return joined(unit.partition(" ")[0], fqn)


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
    for schedule in dict.fromkeys(map(schedule_of, names)):
        schedule.require_idle(asking)
    return names


def full_params(unit: Unit, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and local values of the full parameters that a unit's modules show."""
    for segment in unit.segments:
        for fqn, leaf in zip(segment.layout.fqns, segment.leaves):
            yield whole_name(name, fqn), to_local(leaf).detach()


def own_gradients(unit: Unit, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and local values of the gradients on a unit's leaves, or in their place."""
    for segment in unit.segments:
        gradients, layout = segment.gradients, segment.layout
        for index, (fqn, leaf) in enumerate(zip(layout.fqns, segment.leaves)):
            if leaf.grad is not None:
                yield whole_name(name, fqn), to_local(leaf.grad)
            elif gradients.used[index] and gradients.buffer is segment.full:
                yield whole_name(name, fqn), layout.views(segment.full.data)[index]


def shard_pieces(unit: Unit, name: str, layouts: Collection[Layout] | None = None) -> Iterator[Piece]:
    """Yields this rank's pieces of a unit's parameters, or those of some layouts, in master dtype.

    Tensor subclasses have no plain numbers: they have no pieces.
    """
    for layout in unit.layouts if layouts is None else layouts:
        if layout.extended:
            continue
        if cuts := _cuts(layout):
            yield from _runs(unit, name, cuts, [to_local(each.detach()) for each in layout.sources])
            continue
        for each in layout.intervals():
            yield Piece(whole_name(name, each.fqn), each.held_shape, each.start, each.data.detach())


def gradient_pieces(unit: Unit, layout: Layout, name: str, reduced: torch.Tensor) -> Iterator[Piece]:
    """Yields the pieces of a reduced gradient shard."""
    if cuts := _cuts(layout):
        yield from _runs(unit, name, cuts, layout.cut(reduced.detach()))
        return
    for each, data in zip(layout.intervals(), layout.pieces(reduced.detach())):
        yield Piece(whole_name(name, each.fqn), each.held_shape, each.start, data.reshape(-1))


def key_of(param: nn.Parameter) -> object:
    """Returns what tells a parameter of an optimizer from others, also one that is a piece."""
    return (id(param.flat), param.fqn) if isinstance(param, FlatPiece) else id(param)


def keys_of(source: nn.Parameter, fqn: str) -> tuple[object, object]:
    """Returns the keys of a sharded parameter, and of the piece of it that has this name in the unit."""
    return id(source), (id(source), fqn)


def step_pieces(unit: Unit, name: str, held: Set[object]) -> Iterator[Piece]:
    """Yields the pieces of the gradients of the parameters with these keys, as an optimizer sees them."""
    for layout in unit.layouts:
        if cuts := _cuts(layout):
            seen = [(cut, source.grad) for cut, source in zip(cuts, layout.sources) if id(source) in held]
            there = [(cut, to_local(grad)) for cut, grad in seen if grad is not None]
            yield from _runs(unit, name, [cut for cut, _ in there], [grad for _, grad in there])
            continue
        for each in layout.intervals():
            if each.source.grad is not None and not held.isdisjoint(keys_of(each.source, each.fqn)):
                data = to_local(each.source.grad).reshape(-1)
                if not isinstance(each.source.grad, DTensor):
                    data = data.narrow(0, each.offset, each.data.numel())
                yield Piece(whole_name(name, each.fqn), each.held_shape, each.start, data)


def _cuts(layout: Layout) -> list[Cut]:
    """Returns the cuts of parameters that are no single piece on a rank; none for other layouts."""
    cuts = [each for each in layout.extents if isinstance(each, Cut)]
    return cuts if layout.extended or any(each.dim for each in cuts) else []


def _runs(unit: Unit, name: str, cuts: Sequence[Cut], held: Sequence[torch.Tensor]) -> Iterator[Piece]:
    """Yields the contiguous pieces of tensors that are cut along any dimension."""
    assert unit.handle is not None
    rank = unit.handle.communicator.rank
    for cut, tensor in zip(cuts, held):
        inner = cut.shape[cut.dim + 1 :].numel()
        length, first = cut.rows(rank) * inner, cut.first_row(rank) * inner
        for number, data in enumerate(tensor.reshape(-1, length) if tensor.numel() else ()):
            start = number * cut.shape[cut.dim] * inner + first
            yield Piece(whole_name(name, cut.fqn), cut.shape, start, data)
