"""The page on streams: its tables say what the scripts find."""

from collections import Counter

import pytest
from figures import UNITS, measure, shown
from host_waits import CASES, HEAD, cell
from mutations import places

from bed.paths import ROOT
from fronts import FRONTS, either_front


def _rows(head):
    page = (ROOT / "docs" / "architecture" / "streams.md").read_text().splitlines()
    first = next(number for number, line in enumerate(page) if line.startswith(head)) + 2
    last = next((number for number in range(first, len(page)) if not page[number].startswith("|")), None)
    return page[first:last]


def test_every_wait_of_the_package_has_a_verdict():
    rows, expected = _rows("| where | what | missed by"), [place.row for place in places()]
    counted = Counter(next((start for start in expected if row.startswith(start)), row) for row in rows)
    assert counted == Counter(expected)
    assert not [row for row in rows if row.endswith(("| |", "**nobody** |"))]


def test_the_table_has_a_row_for_each_option():
    assert [row.split(" | ")[0] for row in _rows(HEAD[0])] == [f"| {case.name}" for case in CASES]


def _cells():
    """Each option with each front-end; fast with one of those that have it, which takes turns."""
    for number, case in enumerate(CASES):
        for front in FRONTS:
            fast = front == case.fronts[number % len(case.fronts)]
            marks = () if fast else pytest.mark.slow
            yield pytest.param(number, front, id=f"{case.name}-{front}", marks=marks)


@pytest.mark.parametrize(("number", "front"), list(_cells()))
def test_the_host_waits_where_the_table_says(number, front):
    told = _rows(HEAD[0])[number].split(" | ")[1 + FRONTS.index(front)].removesuffix(" |")
    assert cell(CASES[number], front) == told


@either_front
def test_memory_order_and_waits(front):
    row = measure(front, "nothing else")
    assert 1 <= row.forward["compute"] < row.backward["compute"] < 1.5 * UNITS
    assert row.waits == 0 < row.collectives == 3 * UNITS
    assert shown(row).endswith(f"| {row.beside} of {row.collectives} | 0 |")


def test_offload_waits_and_what_travels_together_takes_memory():
    alone, offloaded = measure("flat", "nothing else"), measure("flat", "offload")
    assert offloaded.waits > 0 and offloaded.forward["compute"] > alone.forward["compute"]
    together = measure("flat", "units that travel together")
    assert together.collectives <= alone.collectives / 2
    assert together.forward["compute"] > UNITS > alone.forward["compute"]
