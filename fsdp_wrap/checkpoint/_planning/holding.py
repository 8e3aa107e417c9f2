"""What one rank holds of a state, in a form that is the same on all ranks that hold parts of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_wrap._params import IntervalTensor, to_local
from fsdp_wrap.checkpoint._manifest import Box
from fsdp_wrap.checkpoint._planning.divisions import (
    AsHeld,
    Beside,
    ByIntervals,
    ByRows,
    Division,
    is_empty,
    whole,
)

Path = tuple[Any, ...]
"""The keys that lead to a value in a nested state."""

_SPREAD, _DEPTH = ("optim", "state"), 3
"""The part of a state in which ranks lack entries of parameters of which they hold nothing, by parameter."""

_OF_ONE_RANK = ("extra", "random")
"""Parts of a state in which each rank has entries below its own number."""


class TensorKind(NamedTuple):
    """The properties of a tensor; of those that DCP keeps, the memory format is the same for all."""

    dtype: torch.dtype
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, properties: TensorProperties) -> TensorKind:
        """Takes what differs from DCP's properties."""
        return cls(properties.dtype, properties.layout, properties.requires_grad, properties.pin_memory)

    @property
    def properties(self) -> TensorProperties:
        """The properties, as DCP has them."""
        return TensorProperties(self.dtype, self.layout, self.requires_grad, pin_memory=self.pin_memory)


class Sharing(NamedTuple):
    """What several entries share: the ranks that hold them, and how they are cut."""

    cut: Division
    kind: TensorKind | None
    """None for what is pickled."""

    group: int | None
    """The number of the group of ranks, in the order of places; None for all ranks that hold the entry."""


PICKLED_BOX: Box = ((), ())
"""What stands for the box of an entry that is pickled."""

PICKLED = Sharing(AsHeld((), (PICKLED_BOX,)), None, None)


class Entry(NamedTuple):
    """An entry of a flattened state, with the number of its part."""

    fqn: str
    path: Path
    part: int


Groups = tuple[tuple[int, ...], ...]
"""Groups of ranks, numbered as in the default group."""


class HoldingSums(NamedTuple):
    """What is told of a holding to all ranks: equal sums are of equal sections, or groups."""

    common: bytes
    begun: bytes
    groups: bytes
    own: tuple[tuple[str, Path], ...]
    """Entries of this rank alone, which are pickled."""


@dataclass
class Section:
    """Some entries, and the parts that they name."""

    entries: list[Entry] = field(default_factory=list)
    parts: list[Sharing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers: dict[Sharing, int] = {}

    def add(self, fqn: str, path: Path, part: Sharing) -> None:
        """Adds an entry."""
        number = self._numbers.setdefault(part, len(self.parts))
        if number == len(self.parts):
            self.parts.append(part)
        self.entries.append(Entry(fqn, path, number))

    def sum(self) -> bytes:
        """Returns a checksum that only equal sections share."""
        return _sum_of((self.parts, self.entries))


@dataclass
class Holding:
    """The entries of a state on one rank, and its part of their boxes."""

    common: Section = field(default_factory=Section)
    """Entries that mostly all ranks have."""

    begun: Section = field(default_factory=Section)
    """Optimizer state that only ranks with elements of a parameter have; this one has the first element."""

    groups: Groups = ()
    own: tuple[tuple[str, Path], ...] = ()
    parts: dict[str, Sharing] = field(default_factory=dict)
    """What this rank holds, by entry."""

    items: dict[str, list[WriteItem]] = field(default_factory=dict)
    """What DCP would write on this rank alone, by entry."""

    def sums(self) -> HoldingSums:
        """Returns what all ranks must know."""
        return HoldingSums(self.common.sum(), self.begun.sum(), _sum_of(self.groups), self.own)


def _sum_of(value: object) -> bytes:
    return blake2b(repr(value).encode(), digest_size=16).digest()


def described(
    state: Mapping[str, Any], paths: Mapping[str, Path], items: Sequence[WriteItem], rank: int
) -> Holding:
    """Describes a flattened state on a rank, which DCP would write as `items`.

    Args:
        state: The values.
        paths: The keys that lead to each.
        items: What DCP would write of them.
        rank: The number of this rank among those that save.
    """
    holding = Holding()
    for item in items:
        holding.items.setdefault(item.index.fqn, []).append(item)
    groups = _Groups()
    own: list[tuple[str, Path]] = []
    anchors = _anchors_in(state, paths)
    for fqn, value in state.items():
        path, of_value = paths[fqn], holding.items.get(fqn, [])
        anchor = anchors.get(path[:_DEPTH]) if path[:2] == _SPREAD else None
        is_pickled = bool(of_value) and of_value[0].type is WriteItemType.BYTE_IO
        if is_pickled and path[:2] in [(top, str(rank)) for top in _OF_ONE_RANK]:
            own.append((fqn, path))
            continue
        if anchor is not None and anchor.part is not None and not anchor.part.is_first_copy:
            holding.items.pop(fqn, None)  # the ranks of the first copy have all of it
            continue
        if not of_value and not isinstance(value, torch.Tensor):
            continue
        part = PICKLED if is_pickled else _part_of(value, of_value, groups)
        if anchor is None or _is_own_part(part):
            if of_value or part.group is not None:  # else others tell of it
                holding.common.add(fqn, path, part)
        else:
            part = _beside(part, anchor, groups)
            if anchor.start == 0:
                holding.begun.add(fqn, path, part)
        holding.parts[fqn] = part
    holding.groups, holding.own = groups.all, tuple(own)
    return holding


def _anchors_in(state: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[Path, IntervalTensor]:
    """Returns a piece of the state of each parameter that is spread over ranks and has elements here."""
    anchors: dict[Path, IntervalTensor] = {}
    for fqn, value in state.items():
        if paths[fqn][:2] == _SPREAD and type(value) is IntervalTensor and value.piece.numel():
            if value.spread is not None and not value.spread.held_by.replicated:
                anchors.setdefault(paths[fqn][:_DEPTH], value)
    return anchors


def _beside(part: Sharing, anchor: IntervalTensor, groups: _Groups) -> Sharing:
    """Returns a part with the ranks that hold it: those that have elements of the anchor."""
    if isinstance(part.cut, ByIntervals):
        return part
    cut, _, group = _part_of(anchor, [], groups)
    assert isinstance(cut, ByIntervals) and isinstance(part.cut, AsHeld)
    return Sharing(Beside(part.cut.shape, part.cut.held, cut), part.kind, group)


def _is_own_part(part: Sharing) -> bool:
    """Whether only this rank knows its part of a tensor, such as the scales of its elements."""
    return (
        isinstance(part.cut, AsHeld) and part.kind is not None and part.cut.held != (whole(part.cut.shape),)
    )


class _Groups:
    """The groups of ranks of one holding, by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._of_meshes: dict[int, int] = {}

    @property
    def all(self) -> Groups:
        """The groups, in the order of their numbers."""
        return (*self._numbers,)

    def number(self, ranks: tuple[int, ...]) -> int:
        """Returns the number of a group."""
        return self._numbers.setdefault(ranks, len(self._numbers))

    def of_mesh(self, mesh: DeviceMesh) -> int:
        """Returns the number of a mesh's ranks; the mesh lives as long as the state."""
        if id(mesh) not in self._of_meshes:
            self._of_meshes[id(mesh)] = self.number(tuple(mesh.mesh.flatten().tolist()))
        return self._of_meshes[id(mesh)]


def _part_of(value: Any, items: Sequence[WriteItem], groups: _Groups) -> Sharing:
    """Returns how a tensor is cut, with its group; if that is not known, the boxes that this rank has."""
    if type(value) is IntervalTensor:
        kind = TensorKind(value.dtype)
        part, spread = value.part, value.spread
        if spread is not None and not spread.held_by.replicated and (part is None or part.is_first_copy):
            shape, held_by = tuple(value.shape), spread.held_by
            box = whole(shape) if part is None else part.box
            cut = ByIntervals(shape, box, held_by.size, spread.first, spread.length)
            return Sharing(cut, kind, groups.number(held_by.ranks))
    elif items:
        kind = TensorKind.of(_data_of(items[0]).properties)
    else:
        kind = TensorKind.of(TensorProperties.create_from_tensor(to_local(value)))
    if type(value) is DTensor and not hasattr(to_local(value), "__create_write_items__"):
        mesh = value.device_mesh
        rows = ByRows.of(tuple(value.shape), tuple(mesh.shape), value.placements)
        if rows is not None:
            return Sharing(rows, kind, groups.of_mesh(mesh))
    shape = tuple(_data_of(items[0]).size if items else value.shape)
    boxes = tuple(box for item in items for box in [box_of(item)] if not is_empty(box) or 0 in shape)
    return Sharing(AsHeld(shape, boxes), kind, None)


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def box_of(item: WriteItem) -> Box:
    """Returns the box of a tensor that an item is."""
    chunk = _data_of(item).chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)
