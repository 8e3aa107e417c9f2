"""Owners of matrices, and the rounds in which matrices travel: plain numbers, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_EVEN = 1.02
"""Owners whose load is so much of the mean, or less, keep what lies with them."""


@dataclass(frozen=True)
class Load:
    """Cost and elements of a matrix, and the ranks that have all of it, to which it need not be sent."""

    cost: int
    numel: int
    holders: tuple[int, ...] = ()


def owners_of(loads: Sequence[Load], ranks: int) -> list[int]:
    """Returns an owner for each matrix, so that costs are even over ranks, and then memory.

    A matrix that lies wholly on some ranks goes to one of them, where that leaves the costs even.
    """
    owners = [-1] * len(loads)
    costs, numels = [0] * ranks, [0] * ranks

    def give(index: int, rank: int) -> None:
        owners[index] = rank
        costs[rank] += loads[index].cost
        numels[rank] += loads[index].numel

    def lightest(among: Sequence[int]) -> int:
        return min(among, key=lambda rank: (costs[rank], numels[rank], rank))

    order = sorted(range(len(loads)), key=lambda index: (-loads[index].cost, index))
    bound = _EVEN * sum(load.cost for load in loads) / ranks
    for index in order:  # first what has a place
        holders = loads[index].holders
        if holders and costs[rank := lightest(holders)] + loads[index].cost <= bound:
            give(index, rank)
    for index in order:
        if owners[index] < 0:
            give(index, lightest(range(ranks)))
    _exchange(loads, owners, costs, bound)
    return owners


def _exchange(loads: Sequence[Load], owners: list[int], costs: list[int], bound: float) -> None:
    """Exchanges matrices of the rank with the highest cost for cheaper ones, or none, while that helps."""
    for _ in loads:
        heavy = max(range(len(costs)), key=lambda rank: (costs[rank], -rank))
        if costs[heavy] <= bound:
            return
        own = _by_cost(loads, owners)
        best: tuple[int, int, int, int] | None = None  # the higher costs after, the other rank, and the two
        for light in range(len(costs)):
            for cost, index in own.get(heavy, {}).items():
                for less, other in (*own.get(light, {}).items(), (0, -1)):
                    after = max(costs[heavy] - cost + less, costs[light] + cost - less)
                    if after < (costs[heavy] if best is None else best[0]):
                        best = after, light, index, other
        if best is None:
            return
        _, light, index, other = best
        gain = loads[index].cost - (loads[other].cost if other >= 0 else 0)
        costs[heavy], costs[light], owners[index] = costs[heavy] - gain, costs[light] + gain, light
        if other >= 0:
            owners[other] = heavy


def _by_cost(loads: Sequence[Load], owners: Sequence[int]) -> dict[int, dict[int, int]]:
    """Returns for each rank one of its matrices of each cost, preferably one that it does not hold whole."""
    by_rank: dict[int, dict[int, int]] = {}
    for stays in (True, False):
        for index, (load, owner) in enumerate(zip(loads, owners)):
            if (owner in load.holders) == stays:
                by_rank.setdefault(owner, {})[load.cost] = index
    return by_rank


def rounds_of(
    loads: Mapping[int, Load], owners: Sequence[int], travels: Sequence[bool], most: int
) -> list[list[int]]:
    """Returns the matrices of each round; those that do not travel are in the first.

    Every owner has an even part of its costs in each round. It gets at most `most` elements, unless one
    matrix has more.
    """
    own: dict[int, list[int]] = {}
    for index in loads:
        if travels[index]:
            own.setdefault(owners[index], []).append(index)
    largest = max((sum(loads[index].numel for index in indices) for indices in own.values()), default=0)
    longest = max(map(len, own.values()), default=0)
    count = min(longest, -(-largest // most))
    rounds: list[list[int]] = [[] for _ in range(count)]
    for indices in own.values():
        indices.sort(key=lambda index: (-loads[index].cost, index))
        total, done = sum(loads[index].cost for index in indices) or 1, 0
        for index in indices:
            middle = done + loads[index].cost / 2
            rounds[min(count - 1, int(count * middle / total))].append(index)
            done += loads[index].cost
    return [[index for index in loads if not travels[index]], *rounds]
