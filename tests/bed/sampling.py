"""Which part of a product of parameters each tier runs.

A test with three or more parameters runs in the fast tier with combinations in which every two values meet
that meet in any; one that is marked `each_value`, because it takes long, with combinations in which every
value is. The others are left over, as are values that `few_fast` marks, and all of a test that is marked
`left_over` itself. The slow tier runs one in eight of what is left over, or one in the number that the mark
has, `left_over(4)`, drawn anew for each commit. Unless it is to be thorough: then it runs all.
"""

import itertools
import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

from bed.paths import ROOT

THOROUGH = os.environ.get("FSDP_WRAP_THOROUGH") == "1"
"""Whether the slow tier leaves nothing out, for which it takes hours more."""
DRAW = "FSDP_WRAP_DRAW"
"""The variable of the environment that says which left-over combinations the slow tier runs: any text."""
_ONE_IN = 8

_Together = tuple[tuple[int, str], ...]
"""Values that are to meet, by the number of the parameter."""


def draw() -> str:
    """Returns by what left-over combinations are drawn: the commit, unless the environment says otherwise.

    From the first call on the environment says so, to all workers of pytest-xdist, and also once the commit
    is another.
    """
    if DRAW not in os.environ:
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        try:
            os.environ[DRAW] = subprocess.check_output(
                command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True
            ).strip()
        except (OSError, subprocess.CalledProcessError):  # not a checkout
            os.environ[DRAW] = "none"
    return os.environ[DRAW]


def sample(items: list[pytest.Item], given: Sequence[str]) -> list[pytest.Item]:
    """Marks left-over combinations as slow; takes out and returns those that were not drawn.

    Args:
        items: The collected tests.
        given: Arguments of the command line. A combination whose id is one of them is in the fast tier.
    """
    names = {argument.partition("::")[2] for argument in given}
    tests: dict[str, dict[pytest.Item, set[_Together]]] = defaultdict(dict)
    for item in items:
        if not any(mark.name in ("slow", "gpu", "left_over") for mark in item.iter_markers()):
            tests[item.nodeid.partition("[")[0]][item] = _meetings(item)
    for combinations in tests.values():
        for item in combinations.keys() - _covering(combinations):
            item.add_marker(pytest.mark.left_over)
    left = {item for item in items if item.get_closest_marker("left_over") and _name(item) not in names}
    for item in left:
        item.add_marker(pytest.mark.slow)
    omitted = set() if THOROUGH else {item for item in left if not _is_drawn(item)}
    items[:] = [item for item in items if item not in omitted]
    return [*omitted]


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _is_drawn(item: pytest.Item) -> bool:
    """Whether the draw takes this item, whatever else was collected."""
    mark = item.get_closest_marker("left_over")
    (one_in,) = mark.args if mark is not None and mark.args else (_ONE_IN,)
    return zlib.crc32(f"{draw()} {_name(item)}".encode()) % one_in == 0


def few_fast(values: Iterable[object], step: int) -> list[object]:
    """Leaves all but every n-th value of a parameter over to the slow tier."""
    left_over = pytest.mark.left_over
    return [one if n % step == 0 else pytest.param(one, marks=left_over) for n, one in enumerate(values)]


def _meetings(item: pytest.Item) -> set[_Together]:
    """Returns the pairs of values that meet in this item; its single values under the mark `each_value`."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    values = [repr(params[name]) for name in sorted(params)]
    together = 2 if item.get_closest_marker("each_value") is None else 1
    return set(itertools.combinations(enumerate(values), min(together, len(values))))


def _covering(combinations: dict[pytest.Item, set[_Together]]) -> set[pytest.Item]:
    """Returns a few of the items that contain every meeting of any of them."""
    waiting = dict(combinations)
    left = set().union(*waiting.values())
    chosen = set()
    while left:
        best = max(waiting, key=lambda item: len(left & waiting[item]))
        left -= waiting.pop(best)
        chosen.add(best)
    return chosen
