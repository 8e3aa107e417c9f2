"""`AuditedSegment`: a segment of a unit, whose buffer is the shards of all ranks; its sums and elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_wrap._comm import Communicator
from fsdp_wrap._params import Layout, Segment, ShardedParams
from fsdp_wrap._runtime import Unit
from fsdp_wrap._values.auditing.corruption import GATHER, REDUCTION, SHARD, UPDATE, Corruption
from fsdp_wrap._values.finding import first_true, index_at
from fsdp_wrap._values.pieces import whole_name
from fsdp_wrap._values.statistics import bit_sums, changed_place

Sums = tuple[int, int]
"""Sums over bits, as of `bit_sums`."""

_WHAT = {
    SHARD: "the shard",
    GATHER: "the gathered buffer",
    REDUCTION: "the reduced gradient",
    UPDATE: "the updated shard",
}


class Key(NamedTuple):
    """Tells a segment on all ranks: the name of its unit, and its number."""

    unit: str
    segment: int


class Element(NamedTuple):
    """An element of a parameter."""

    fqn: str
    at: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AuditedSegment:
    """A segment, with the rank's part of its buffer."""

    unit: Unit
    key: Key

    @property
    def sharded(self) -> ShardedParams:
        """The segment's sharded parameters."""
        return self.unit.params[self.key.segment]

    @property
    def layout(self) -> Layout:
        """Where they lie."""
        return self.sharded.layout

    @property
    def segment(self) -> Segment:
        """The segment."""
        return self.unit.segments[self.key.segment]

    @property
    def communicator(self) -> Communicator:
        """The ranks that have shards of the segment."""
        return self.unit.buffers.communicator

    def own_sums(self, dtype: torch.dtype) -> Sums:
        """Returns sums over this rank's part of a gathered buffer, from its shard; 0 between parameters."""
        layout, shard = self.layout, self.sharded.flat_param.detach()
        own = torch.zeros(layout.shard_numel, dtype=dtype, device=shard.device)
        for target, source in zip(layout.pieces(own), layout.pieces(shard)):
            target.copy_(source)
        plain, weighted = bit_sums(own.unsqueeze(0))[0].tolist()
        return plain, weighted

    def element_at(self, place: int, rank: int | None = None) -> Element:
        """Returns the parameter and index at a place of a rank's part, or next behind it."""
        layout, rank = self.layout, self.communicator.rank if rank is None else rank
        numbers = layout.pack(torch.arange(1, layout.full_numel + 1))
        for gap in layout.padding(numbers) if layout.in_place else ():
            gap.zero_()
        behind = numbers[rank * layout.shard_numel :][place : layout.shard_numel]
        number = int(behind[first_true(behind > 0)]) - 1
        for extent in layout.extents:
            if extent.start <= number < extent.stop:
                fqn = whole_name(self.key.unit, extent.fqn)
                return Element(fqn, index_at(number - extent.start, extent.shape), tuple(extent.shape))
        return Element(whole_name(self.key.unit, layout.fqns[0]))

    def changed(self, apart: Sums, rank: int | None = None) -> Element | None:
        """Returns the one element of a rank's part by which sums differ; None if there are several."""
        place = changed_place(self.layout.shard_numel, *apart)
        return None if place is None else self.element_at(place, rank)

    def corruption(
        self, rank: int, step: int, phase: str, told: str, element: Element | None, **more: Any
    ) -> Corruption:
        """Returns a finding about an element of the part, or about several; `more` are further fields."""
        what = _WHAT[phase]
        if element is None:
            tensor = f"{what} of '{self.layout.fqns[0]}' and others"
            return Corruption(rank, step, phase, self.key.unit, tensor, told, **more)
        fields = {"count": 1, "index": element.at, "shape": element.shape, **more}
        return Corruption(rank, step, phase, self.key.unit, f"{what} of '{element.fqn}'", told, **fields)


def parts_of(units: Mapping[str, Unit]) -> dict[ShardedParams, AuditedSegment]:
    """Returns the audited part of each segment, save those that hold tensor subclasses."""
    return {
        sharded: AuditedSegment(unit, Key(name, number))
        for name, unit in units.items()
        for number, sharded in enumerate(unit.params)
        if not sharded.extended
    }


def apart(actual: Sums, expected: Sums) -> Sums:
    """Returns the difference of sums modulo 2^64, with a sign."""
    plain, weighted = ((a - b + 2**63) % 2**64 - 2**63 for a, b in zip(actual, expected))
    return plain, weighted
