"""Which part of a product of parameters the fast tier runs.

A test that is parametrized three times or more runs there with combinations in which every two values meet;
the others are slow.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable

import pytest

_Values = tuple[Hashable, ...]
_Pair = tuple[Hashable, ...]


def mark_sampled_out(items: Iterable[pytest.Item]) -> None:
    """Marks as slow what no pair of values needs."""
    tests: dict[str, dict[pytest.Item, _Values]] = defaultdict(dict)
    for item in items:
        values = _values(item)
        if len(values) > 2 and not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu")):
            tests[item.nodeid.partition("[")[0]][item] = values
    for combinations in tests.values():
        for item in combinations.keys() - _covering(combinations):
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> _Values:
    """What tells this item from the others of its test: per `parametrize` the objects that it gives."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    axes = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(id(params[name.strip()]) for name in names))
    return tuple(axes)


def _covering(combinations: dict[pytest.Item, _Values]) -> set[pytest.Item]:
    """Few of the items, in which every pair of values is that is in any."""
    pairs = {item: _pairs(values) for item, values in combinations.items()}
    left = set().union(*pairs.values())
    chosen = set()
    while left:
        best = max(pairs, key=lambda item: len(left & pairs[item]))
        left -= pairs.pop(best)
        chosen.add(best)
    return chosen


def _pairs(values: _Values) -> set[_Pair]:
    return set(itertools.combinations(enumerate(values), 2))
