"""`Shards`: sums over the bits of shards, and of each owner's part of what was gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fsdp_wrap._params import Layout
from fsdp_wrap._runtime import Unit
from fsdp_wrap._values.auditing.corruption import GATHER, SHARD, UPDATE, Corruption
from fsdp_wrap._values.auditing.places import (
    Element,
    Key,
    Sums,
    changed_element,
    difference,
    keyed,
    own_part,
    sums_of,
)
from fsdp_wrap._values.statistics import bit_sums


class Look(NamedTuple):
    """Sums over a shard, and the versions of its parameters, which writes change."""

    written: object
    sums: Sums


class _Arrived(NamedTuple):
    """Sums over each owner's part of a gathered buffer, still on the device."""

    unit: Unit
    layout: Layout
    key: Key
    where: str
    sums: torch.Tensor


class Shards:
    """The shards and gathered parameters of one rank in a drawn step.

    Args:
        units: Units by name.
        rank: Global rank.

    Attributes:
        looks: The last look at each shard.
        sent: Sums over the shards in the dtype in which they are gathered.
    """

    def __init__(self, units: Mapping[Unit, str], rank: int) -> None:
        self._units, self._rank = units, rank
        self.looks: dict[Key, Look] = {}
        self.sent: dict[Key, Sums] = {}
        self._gathered: list[_Arrived] = []

    def look(self) -> None:
        """Looks at all shards."""
        layouts = keyed(self._units)
        self.looks = {
            key: Look(layout.written(), sums_of(own_part(layout, layout.dtype)))
            for layout, (_, key) in layouts.items()
        }

    def take(self, unit: Unit, again: bool) -> None:
        """Takes sums over the parts of a unit's full parameters; `again` in a backward."""
        for number, segment in enumerate(unit.segments):
            assert unit.handle is not None
            layout, key, ranks = segment.layout, Key(self._units[unit], number), unit.handle.communicator.size
            lends = segment.gradients.buffer is segment.full  # gradients have taken its place
            if layout.extended or ranks == 1 or lends:
                continue
            if key not in self.sent:
                self.sent[key] = sums_of(own_part(layout, segment.dtypes.param))
            full = layout.pack(segment.full.data)
            if layout.in_place and layout.padding(full):
                full = full.clone()
                for gap in layout.padding(full):
                    gap.zero_()
            where = "backward" if again else "forward"
            self._gathered.append(_Arrived(unit, layout, key, where, bit_sums(full.view(ranks, -1))))

    def check_gathered(self, step: int, sent: Mapping[int, Mapping[Key, Sums]]) -> Iterator[Corruption]:
        """Yields parts that are not the shards of their owners; `sent` has the sums of all, by rank."""
        taken, self._gathered, self.sent = self._gathered, [], {}
        for unit, layout, key, where, sums in taken:
            assert unit.handle is not None
            owners = sorted(unit.handle.communicator.members)
            for row, (owner, found) in enumerate(zip(owners, sums.tolist())):
                expected = sent.get(owner, {}).get(key)
                if expected is not None and (*found,) != expected:
                    element = changed_element(layout, key.unit, row, difference((*found,), expected))
                    told = f"Its part of rank {owner} is not the shard there, in the {where}"
                    yield _of(self._rank, step, GATHER, key, layout, element, told, owner=owner)

    def check_kept(self, step: int) -> Iterator[Corruption]:
        """Looks again, and yields the shards in which one bit has changed without a write.

        Other changes may be writes of the program by `.data`, which nothing tells of.
        """
        before = self.looks
        self.look()
        for layout, (unit, key) in keyed(self._units).items():
            old, new = before.get(key), self.looks[key]
            if old is None or old.written != new.written or old.sums == new.sums:
                continue
            assert unit.handle is not None
            apart = difference(new.sums, old.sums)
            element = changed_element(layout, key.unit, unit.handle.communicator.rank, apart)
            if element is not None and not abs(apart[0]) & (abs(apart[0]) - 1):
                told = "One bit has changed since the last look, and no optimizer has written to it"
                yield _of(self._rank, step, SHARD, key, layout, element, told)

    def check_replicas(
        self, step: int, phase: str, looks: Mapping[int, Mapping[Key, Sums]]
    ) -> Iterator[Corruption]:
        """Yields shards that differ between replicas, on the first rank of each; `looks` are all ranks'."""
        for layout, (unit, key) in keyed(self._units).items():
            assert unit.handle is not None
            copies = sorted(unit.handle.replicas.members)
            held = {rank: looks[rank][key] for rank in copies if key in looks.get(rank, {})}
            if self._rank != min(held, default=-1) or len({*held.values()}) < 2:
                continue
            values = [*held.values()]
            most = max(values, key=values.count)
            wrong = tuple(rank for rank, sums in held.items() if sums != most)
            apart = difference(held[wrong[0]], most)
            element = changed_element(layout, key.unit, unit.handle.communicator.rank, apart)
            told = "Replicas of the shard differ"
            if 2 * values.count(most) > len(values):
                for rank in wrong:
                    yield _of(rank, step, phase, key, layout, element, told)
            else:
                yield _of(min(held), step, phase, key, layout, element, told, suspects=tuple(held))


def _of(
    rank: int,
    step: int,
    phase: str,
    key: Key,
    layout: Layout,
    element: Element | None,
    told: str,
    **more: Any,
) -> Corruption:
    what = {SHARD: "the shard", GATHER: "the gathered buffer", UPDATE: "the updated shard"}[phase]
    if element is None:
        return Corruption(
            rank, step, phase, key.unit, f"{what} of '{layout.fqns[0]}' and others", told, **more
        )
    fqn, index, shape = element
    return Corruption(rank, step, phase, key.unit, f"{what} of '{fqn}'", told, index, shape, 1, **more)
