"""All ranks come to know what each of them holds, without sending what is the same on many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from fsdp_wrap.checkpoint._planning.collector import uncollected
from fsdp_wrap.checkpoint._planning.holding import Groups, Holding, HoldingSums, Section, described
from fsdp_wrap.checkpoint._planning.plan import SavingPlan, Variant
from fsdp_wrap.checkpoint._team import Team
from fsdp_wrap.checkpoint._torch_private import DistWrapper, StoragePrefix

T = TypeVar("T")


@dataclass
class Agreed:
    """What all ranks know, and what this one holds; each makes the same plan from it."""

    planner: DefaultSavePlanner
    rank: int
    ranks: Sequence[int]
    sums: Sequence[HoldingSums]
    holding: Holding
    variants: Sequence[Variant]

    @cached_property
    def _plan(self) -> SavingPlan:
        return SavingPlan(self.variants, [of_rank.own for of_rank in self.sums], self.ranks)

    def own_plan(self) -> SavePlan:
        """Returns what this rank writes."""
        with torch.device("cpu"):  # whatever device the user has made the default
            items = self._plan.items_of(self.rank, self.holding)
        return self.planner.finish_plan(
            SavePlan(items, StoragePrefix(f"__{self.rank}_"), self.planner.mappings)
        )

    def metadata(self) -> Metadata:
        """Returns the metadata of the whole state."""
        with uncollected(), torch.device("cpu"):
            return self._plan.metadata()


def agree(state: dict[str, Any], team: Team) -> Agreed:
    """Tells all ranks what this one holds of a state; collective.

    Ranks tell sums first. For each sum, one rank tells what it is of.

    Args:
        state: What DCP would save.
        team: The ranks that save.
    """
    planner = DefaultSavePlanner()
    holdings: list[Holding] = []

    def tell() -> HoldingSums:
        planner.set_up_planner(state)
        with torch.device("cpu"):
            items = planner.create_local_plan().items
            holdings.append(described(planner.state_dict, planner.mappings, items, team.rank))
        return holdings[0].sums()

    sums = DistWrapper(team.group, team.group is not None, 0).all_gather("plan", tell)
    holding = holdings[0]
    common = _told(team, [of_rank.common for of_rank in sums], lambda: holding.common)
    groups = _told(team, [of_rank.groups for of_rank in sums], lambda: holding.groups)
    begun = {sums[0].begun: holding.begun}
    if len({of_rank.begun for of_rank in sums}) > 1:
        told = DistWrapper(team.group, True, 0).all_gather("plan", lambda: holding.begun)
        begun = {of_rank.begun: section for of_rank, section in zip(sums, told)}
    return Agreed(planner, team.rank, team.ranks, sums, holding, variants_of(sums, common, begun, groups))


def variants_of(
    sums: Sequence[HoldingSums],
    common: Mapping[bytes, Section],
    begun: Mapping[bytes, Section],
    groups: Mapping[bytes, Groups],
) -> list[Variant]:
    """Returns what all ranks hold, from all ranks' sums and the values behind them.

    Args:
        sums: By rank.
        common: Sections that mostly all ranks have, by their sum.
        begun: Sections that one rank tells for others, by their sum.
        groups: Groups of ranks, by their sum.
    """

    def variant(section: Section, ranks: Sequence[int], is_begun: bool) -> Variant:
        of_ranks = [groups[told] for told in dict.fromkeys(sums[rank].groups for rank in ranks)]
        return Variant(section.entries, section.parts, of_ranks, ranks, is_begun)

    by_common = _by_value([of_rank.common for of_rank in sums])
    by_begun = _by_value([of_rank.begun for of_rank in sums])
    return [
        *(variant(common[told], ranks, False) for told, ranks in by_common.items()),
        *(variant(begun[told], ranks, True) for told, ranks in by_begun.items() if begun[told].entries),
    ]


def _told(team: Team, sums: Sequence[bytes], own: Callable[[], T]) -> dict[bytes, T]:
    """Returns the values behind sums: one rank tells each to all, but nothing is sent if all are equal."""
    by_sum = _by_value(sums)
    if len(by_sum) == 1:
        return {sums[0]: own()}
    return {
        of_value: DistWrapper(team.group, team.group is not None, ranks[0]).broadcast("plan", own)
        for of_value, ranks in by_sum.items()
    }


def _by_value(sums: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Returns by sum the ranks that have it."""
    ranks: dict[bytes, list[int]] = {}
    for rank, of_rank in enumerate(sums):
        ranks.setdefault(of_rank, []).append(rank)
    return ranks
