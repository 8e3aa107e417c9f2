"""The plan of a save: what each rank writes, and the metadata.

It follows from what all ranks hold, and so is the same wherever it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._manifest import Box, tile
from fsdp_wrap.checkpoint._planning.divisions import is_empty
from fsdp_wrap.checkpoint._planning.holding import Entry, Groups, Holding, Path, Sharing
from fsdp_wrap.checkpoint._planning.ownership import OwnedInCopies, OwnedOnce, Ownership

_ALIKE = "all ranks must hold parts of one state"


class Variant(NamedTuple):
    """Ranks whose states have the same entries: for example, those of one stage of a pipeline."""

    entries: Sequence[Entry]
    parts: Sequence[Sharing]
    groups: Sequence[Groups]
    """The groups of ranks; replicas of a model have other groups for the same entries."""

    ranks: Sequence[int]
    """Numbered among those that save."""

    is_begun: bool = False
    """Whether ranks of these groups have the entries, too, that do not tell it."""


class SavingPlan:
    """Who writes what.

    Of boxes that several ranks hold, those of one tensor are written by the replica that has least to write
    until then; the largest tensors come first.

    Args:
        variants: The states of all ranks that save, by their entries.
        own: By rank the entries that it alone has.
        ranks: The ranks that save, numbered as in the default group.

    Raises:
        ValueError: If ranks hold parts that do not belong to one state; it names them.
    """

    def __init__(
        self, variants: Sequence[Variant], own: Sequence[Sequence[tuple[str, Path]]], ranks: Sequence[int]
    ) -> None:
        self._variants, self._own = variants, own
        self._places = {rank: number for number, rank in enumerate(ranks)}
        self._groups: dict[tuple[int, ...], torch.Tensor] = {}
        claims: dict[str, list[tuple[int, int]]] = {}
        self._paths: dict[str, Path] = {}
        for number, variant in enumerate(variants):
            for fqn, path, part in variant.entries:
                claims.setdefault(fqn, []).append((number, part))
                self._paths.setdefault(fqn, path)
        layouts: dict[tuple[tuple[int, int], ...], Ownership] = {}
        self._layouts: dict[str, Ownership] = {}
        for fqn, of_entry in claims.items():
            key = (*of_entry,)
            if key not in layouts:
                layouts[key] = self._layout_of(fqn, key)
            self._layouts[fqn] = layouts[key]
        self._writers = self._balanced()

    def _layout_of(self, fqn: str, claims: Sequence[tuple[int, int]]) -> Ownership:
        parts = [(self._variants[variant], self._variants[variant].parts[part]) for variant, part in claims]
        self._refuse_others(fqn, parts)
        variant, part = parts[0]
        groups = self._groups_of(variant, part)
        if len(parts) == len(groups) == 1 and part.cut.divides:
            holding = groups[0][part.cut.numels() > 0]
            if bool((holding >= 0).all()):
                self._refuse_lacking(fqn, parts, holding.tolist())
                return OwnedOnce(part, part.cut, groups[0])
        holders: dict[Box, list[int]] = {}
        for variant, part in parts:
            boxes = part.cut.boxes()
            for group in self._groups_of(variant, part):
                for rank, of_place in zip(group.tolist(), boxes):
                    for box in of_place if rank >= 0 else ():
                        holders.setdefault(box, []).append(rank)
        if 0 not in part.cut.shape:
            holders = {box: of_box for box, of_box in holders.items() if not is_empty(box)}
        self._refuse_lacking(fqn, parts, chain(*holders.values()))
        if not tile(holders, part.cut.shape):
            first = [f"rank {variant.ranks[0]}" for variant, _ in parts]
            raise ValueError(
                f"'{fqn}', of shape {part.cut.shape}, is cut in ways that leave elements out or hold some "
                f"twice, as {listed(first)} have it: {_ALIKE}"
            )
        return OwnedInCopies(parts[0][1], holders)

    def _groups_of(self, variant: Variant, part: Sharing) -> list[torch.Tensor]:
        """Returns groups of ranks in the order of places; -1 stands for ranks that do not save."""
        if part.group is None:
            return [torch.tensor([rank]) for rank in variant.ranks]
        groups = dict.fromkeys(groups[part.group] for groups in variant.groups)
        for ranks in groups:
            if ranks not in self._groups:  # one for all tensors that lie there
                self._groups[ranks] = torch.tensor([self._places.get(rank, -1) for rank in ranks])
        return [self._groups[ranks] for ranks in groups]

    def _refuse_others(self, fqn: str, parts: Sequence[tuple[Variant, Sharing]]) -> None:
        """Raises if ranks have different things of one name."""
        looks = {_look_of(part): variant.ranks[0] for variant, part in reversed(parts)}
        if len(looks) > 1:
            told = " and ".join(f"{look} on rank {rank}" for look, rank in reversed(looks.items()))
            raise ValueError(f"'{fqn}' is {told}: {_ALIKE}")

    def _refuse_lacking(
        self, fqn: str, parts: Sequence[tuple[Variant, Sharing]], holders: Iterable[int]
    ) -> None:
        """Raises if ranks lack an entry of which others say that they hold a part.

        Not if one rank tells for others: these look for themselves.
        """
        if any(variant.is_begun for variant, _ in parts):
            return
        lacking = set(holders).difference(*(variant.ranks for variant, _ in parts))
        if lacking:
            missing = f"rank{'s' * (len(lacking) > 1)} {listed(sorted(lacking))}"
            raise ValueError(
                f"rank {parts[0][0].ranks[0]} says that '{fqn}' is sharded over {missing} too, "
                f"where nothing has this name: {_ALIKE}"
            )

    def _balanced(self) -> dict[str, int]:
        """Returns the replica that writes an entry, where there are several."""
        loads = torch.zeros(len(self._places), dtype=torch.int64)
        replicated = []
        for fqn, layout in self._layouts.items():
            if len(layout.owners) > 1:
                replicated.append(fqn)
            elif len(layout.owners) == 1:
                loads.index_add_(0, layout.owners[0], layout.nbytes())
        writers: dict[str, int] = {}
        for fqn in sorted(replicated, key=lambda fqn: -int(self._layouts[fqn].nbytes().sum())):
            layout = self._layouts[fqn]
            most = loads[layout.owners].amax(1).tolist()
            writers[fqn] = most.index(min(most))  # the first of equals, on each kind of host
            loads.index_add_(0, layout.owners[writers[fqn]], layout.nbytes())
        return writers

    def items_of(self, rank: int, holding: Holding) -> list[WriteItem]:
        """Returns what a rank writes.

        Args:
            rank: This rank.
            holding: What it holds.

        Raises:
            RuntimeError: If it does not hold what other ranks take it to hold.
        """
        for fqn, part in holding.parts.items():
            layout = self._layouts.get(fqn)
            if layout is None or _look_of(part) != _look_of(layout.part):
                other = "nothing" if layout is None else _look_of(layout.part)
                raise RuntimeError(
                    f"'{fqn}' is {_look_of(part)} on rank {rank} and {other} elsewhere: {_ALIKE}"
                )
        written: list[WriteItem] = []
        for fqn, layout in self._layouts.items():
            items = layout.due(rank, self._writers.get(fqn, 0), holding.items.get(fqn, ()))
            if items is None:
                raise RuntimeError(
                    f"rank {rank} does not hold the part of '{fqn}', of shape {layout.shape}, that other "
                    f"ranks take it to hold: {_ALIKE}"
                )
            written += items
        own = (item for fqn, _ in holding.own for item in holding.items[fqn])
        return [*written, *own]

    def metadata(self) -> Metadata:
        """Returns DCP's metadata; tensors that are cut alike share a list of their boxes."""
        entries: dict[str, STORAGE_TYPES] = {}
        for fqn, layout in self._layouts.items():
            kind = layout.part.kind
            entries[fqn] = (
                BytesStorageMetadata()
                if kind is None
                else TensorStorageMetadata(kind.properties, torch.Size(layout.shape), layout.chunks)
            )
        own = dict(chain.from_iterable(self._own))
        entries.update((fqn, BytesStorageMetadata()) for fqn in own)
        return Metadata(entries, planner_data={**self._paths, **own})


def _look_of(part: Sharing) -> str:
    if part.kind is None:
        return "pickled"
    return f"{part.kind.dtype} of shape {part.cut.shape}"
