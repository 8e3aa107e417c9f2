"""The table of what misses which wait: a row for each place that the script finds, and no other."""

from __future__ import annotations

from collections import Counter

from mutations import places

from bed.paths import ROOT


def test_every_wait_of_the_package_has_a_verdict():
    lines = (ROOT / "docs" / "architecture" / "streams.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| where | what | missed by"))
    rows, expected = lines[first + 2 :], [place.row for place in places()]
    found = Counter(next((each for each in expected if row.startswith(each)), row) for row in rows)
    assert found == Counter(expected)
    assert not [row for row in rows if row.endswith(("| |", "**nobody** |"))]
