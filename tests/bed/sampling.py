"""Which part of a product of parameters the fast tier runs.

A test with three or more parameters runs there with combinations in which every two values meet that meet in
any; one that is marked `each_value`, because it takes long, with combinations in which every value is. The
others are slow. Of what takes longest the slow tier runs a seeded part, unless it is to be thorough.
"""

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import pytest

THOROUGH = os.environ.get("FSDP_WRAP_THOROUGH") == "1"
"""Whether the slow tier leaves nothing out, for which it takes half an hour more."""

_T = TypeVar("_T")

_Together = tuple[tuple[int, str], ...]
"""Values that are to meet, by the number of the parameter."""


def mark_sampled_out(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what no values need that are to meet."""
    tests: dict[str, dict[pytest.Item, set[_Together]]] = defaultdict(dict)
    for item in items:
        if not any(mark.name in ("slow", "gpu") for mark in item.iter_markers()):
            tests[item.nodeid.partition("[")[0]][item] = _meetings(item)
    for combinations in tests.values():
        for item in combinations.keys() - _covering(combinations):
            item.add_marker(pytest.mark.slow)


def few_fast(values: Iterable[object], step: int) -> list[object]:
    """Leaves all but every n-th value of a parameter to the slow tier."""
    slow = pytest.mark.slow
    return [one if n % step == 0 else pytest.param(one, marks=slow) for n, one in enumerate(values)]


def part_of(values: Iterable[_T], one_in: int) -> list[_T]:
    """Draws one in so many values, the same each time, in their order; all where tests are thorough."""
    every = [*values]
    if THOROUGH:
        return every
    chosen = sorted(random.Random(0).sample(range(len(every)), -(-len(every) // one_in)))
    return [every[number] for number in chosen]


def _meetings(item: pytest.Item) -> set[_Together]:
    """Which values meet in this item; nothing less than all where there are two at the most."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    values = [repr(params[name]) for name in sorted(params)]
    together = 2 if item.get_closest_marker("each_value") is None else 1
    return set(itertools.combinations(enumerate(values), min(together, len(values))))


def _covering(combinations: dict[pytest.Item, set[_Together]]) -> set[pytest.Item]:
    """Few of the items, in which all meet that meet in any."""
    waiting = dict(combinations)
    left = set().union(*waiting.values())
    chosen = set()
    while left:
        best = max(waiting, key=lambda item: len(left & waiting[item]))
        left -= waiting.pop(best)
        chosen.add(best)
    return chosen
