"""Places in buffers: the parameter and the index of an element of a rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fsdp_wrap._params import Layout
from fsdp_wrap._runtime import Unit
from fsdp_wrap._values.finding import index_at
from fsdp_wrap._values.pieces import whole_name
from fsdp_wrap._values.statistics import bit_sums, changed_place

Sums = tuple[int, int]
"""Sums over bits, as of `bit_sums`."""


class Key(NamedTuple):
    """A segment of a unit: its name, and the number of the segment."""

    unit: str
    segment: int


class Element(NamedTuple):
    """An element of a parameter."""

    fqn: str
    at: tuple[int, ...] | None
    shape: tuple[int, ...] | None


def keyed(units: Mapping[Unit, str]) -> dict[Layout, tuple[Unit, Key]]:
    """Returns unit and key of each layout; not of those whose numbers tensor subclasses have."""
    return {
        layout: (unit, Key(name, number))
        for unit, name in units.items()
        for number, layout in enumerate(unit.layouts)
        if not layout.extended
    }


def own_part(layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's part of a gathered buffer, from its shard: zero where no parameter lies."""
    shard = layout.flat_param.detach()
    part = torch.zeros(layout.shard_numel, dtype=dtype, device=shard.device)
    for target, source in zip(layout.pieces(part), layout.pieces(shard)):
        target.copy_(source)
    return part


def sums_of(part: torch.Tensor) -> Sums:
    """Returns the sums over the bits of one part."""
    plain, weighted = bit_sums(part.unsqueeze(0))[0].tolist()
    return plain, weighted


def difference(found: Sums, expected: Sums) -> Sums:
    """Returns the difference of sums modulo 2^64, with a sign."""
    plain, weighted = ((a - b + 2**63) % 2**64 - 2**63 for a, b in zip(found, expected))
    return plain, weighted


def changed_element(layout: Layout, name: str, rank: int, apart: Sums) -> Element | None:
    """Returns the one element of a rank's part by which sums differ; None if there are several."""
    place = changed_place(layout.shard_numel, *apart)
    return None if place is None else element_at(layout, name, rank, place)


def element_at(layout: Layout, name: str, rank: int, place: int) -> Element:
    """Returns the parameter and the index that lie at a place of a rank's part, or next behind it."""
    numbers = layout.pack(torch.arange(1, layout.full_numel + 1))
    for gap in layout.padding(numbers) if layout.in_place else ():
        gap.zero_()
    behind = numbers[rank * layout.shard_numel :][place : layout.shard_numel]
    number = int(behind[(behind > 0).to(torch.uint8).argmax()]) - 1
    for extent in layout.extents:
        if extent.start <= number < extent.stop:
            index = index_at(number - extent.start, extent.shape)
            return Element(whole_name(name, extent.fqn), index, tuple(extent.shape))
    return Element(whole_name(name, layout.fqns[0]), None, None)
