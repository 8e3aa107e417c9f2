"""`Shards`: sums over the bits of shards, and of each owner's part of what was gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from fsdp_wrap._runtime import Unit
from fsdp_wrap._values.auditing.corruption import GATHER, SHARD, Corruption
from fsdp_wrap._values.auditing.parts import AuditedSegment, Key, Sums, apart, parts_of
from fsdp_wrap._values.statistics import bit_sums

Looks = Mapping[int, Mapping[Key, Sums]]
"""Sums of all ranks, by rank."""


class _Arrived(NamedTuple):
    """Sums over each owner's part of a gathered buffer, still on the device."""

    part: AuditedSegment
    where: str
    sums: torch.Tensor


class Shards:
    """The shards and gathered parameters of one rank in a drawn step.

    Args:
        units: Units by name.
        rank: Global rank.

    Attributes:
        looks: Sums over each shard at the last look.
        sent: Sums over the shards in the dtype in which they are gathered.
    """

    def __init__(self, units: Mapping[str, Unit], rank: int) -> None:
        self._units, self._rank = units, rank
        self._written: dict[Key, object] = {}  # versions of the parameters, which writes change
        self.looks: dict[Key, Sums] = {}
        self.sent: dict[Key, Sums] = {}
        self._gathered: list[_Arrived] = []

    def look(self) -> None:
        """Looks at all shards."""
        parts = parts_of(self._units)
        self._written = {part.key: sharded.written() for sharded, part in parts.items()}
        self.looks = {part.key: part.own_sums(sharded.dtype) for sharded, part in parts.items()}

    def take(self, name: str, where: str) -> None:
        """Takes sums over the parts of a unit's full parameters, in the forward or backward."""
        unit = self._units[name]
        for number, segment in enumerate(unit.segments):
            part, layout = AuditedSegment(unit, Key(name, number)), segment.layout
            lends = segment.gradients.taken is segment.full  # gradients have taken its place
            if segment.params.extended or part.communicator.size == 1 or lends:
                continue
            if part.key not in self.sent:
                self.sent[part.key] = part.own_sums(segment.dtypes.param)
            full = layout.pack(segment.full.data)
            if layout.in_place and layout.padding(full):
                full = full.clone()
                for gap in layout.padding(full):
                    gap.zero_()
            sums = bit_sums(full.view(part.communicator.size, -1))
            self._gathered.append(_Arrived(part, where, sums))

    def check_gathered(self, step: int, sent: Looks) -> Iterator[Corruption]:
        """Yields parts that are not the shards of their owners; `sent` has the sums of all."""
        gathered, self._gathered, self.sent = self._gathered, [], {}
        for part, where, sums in gathered:
            owners = sorted(part.communicator.members)
            for row, (owner, (plain, weighted)) in enumerate(zip(owners, sums.tolist())):
                expected = sent.get(owner, {}).get(part.key)
                if expected is not None and (plain, weighted) != expected:
                    element = part.changed(apart((plain, weighted), expected), row)
                    told = f"Its part of rank {owner} is not the shard there, in the {where}"
                    yield part.corruption(self._rank, step, GATHER, told, element, owner=owner)

    def check_kept(self, step: int) -> Iterator[Corruption]:
        """Looks again, and yields the shards in which one bit has changed without a write.

        Other changes may be writes of the program by `.data`, which nothing tells of.
        """
        looks, written = self.looks, self._written
        self.look()
        for part in parts_of(self._units).values():
            old, new = looks.get(part.key), self.looks[part.key]
            if old in (None, new) or written[part.key] != self._written[part.key]:
                continue
            change = apart(new, old)
            element = part.changed(change)
            if element is not None and abs(change[0]).bit_count() == 1:
                told = "One bit has changed since the last look, and no optimizer has written to it"
                yield part.corruption(self._rank, step, SHARD, told, element)

    def check_replicas(self, step: int, phase: str, looks: Looks) -> Iterator[Corruption]:
        """Yields shards that differ between replicas, on the first rank of each; `looks` are all ranks'."""
        for part in parts_of(self._units).values():
            copies = sorted(part.unit.buffers.replicas.members)
            held = {rank: looks[rank][part.key] for rank in copies if part.key in looks.get(rank, {})}
            if self._rank != min(held, default=-1) or len({*held.values()}) < 2:
                continue
            values = [*held.values()]
            most = max(values, key=values.count)
            wrong = [rank for rank, sums in held.items() if sums != most]
            element, told = part.changed(apart(held[wrong[0]], most)), "Replicas of the shard differ"
            if 2 * values.count(most) > len(values):
                yield from (part.corruption(rank, step, phase, told, element) for rank in wrong)
            else:
                yield part.corruption(min(held), step, phase, told, element, suspects=tuple(held))
