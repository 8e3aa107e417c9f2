"""What `figures.py` prints is what it says, for a front-end or two."""

from __future__ import annotations

import pytest
from figures import UNITS, measure, table


@pytest.mark.parametrize("front", ["orig", "composable"])
def test_memory_order_and_waits(front):
    row = measure(front, "nothing else")
    assert 1 <= row.forward["compute"] < row.backward["compute"] < 1.5 * UNITS
    assert row.waits == 0 < row.collectives == 3 * UNITS
    assert table([row]).splitlines()[2].endswith(f"| {row.beside} of {row.collectives} | 0 |")


def test_offload_waits_and_what_travels_together_takes_memory():
    alone, offloaded = measure("flat", "nothing else"), measure("flat", "offload")
    assert offloaded.waits > 0 and offloaded.forward["compute"] > alone.forward["compute"]
    together = measure("flat", "units that travel together")
    assert together.collectives <= alone.collectives / 2
    assert together.forward["compute"] > UNITS > alone.forward["compute"]
