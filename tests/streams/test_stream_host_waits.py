"""Where the host waits for the device: the table of the page on streams, cell by cell."""

from __future__ import annotations

import pytest
from host_waits import CASES, HEAD, cell

from bed.paths import ROOT
from fronts import FRONTS


def _rows():
    page = (ROOT / "docs" / "architecture" / "streams.md").read_text().splitlines()
    first = page.index(HEAD[0]) + 2
    last = next(number for number in range(first, len(page)) if not page[number].startswith("|"))
    return page[first:last]


def test_the_table_has_a_row_for_each_option():
    assert [row.split(" | ")[0] for row in _rows()] == [f"| {case.name}" for case in CASES]


def _cells():
    """Each option with each front-end; fast with one of those that have it, which takes turns."""
    for number, case in enumerate(CASES):
        for front in FRONTS:
            fast = front == case.fronts[number % len(case.fronts)]
            marks = () if fast else pytest.mark.slow
            yield pytest.param(number, front, id=f"{case.name}-{front}", marks=marks)


@pytest.mark.parametrize(("number", "front"), list(_cells()))
def test_the_host_waits_where_the_table_says(number, front):
    told = _rows()[number].split(" | ")[1 + FRONTS.index(front)].removesuffix(" |")
    assert cell(CASES[number], front) == told
