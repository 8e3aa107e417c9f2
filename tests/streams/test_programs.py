"""Programs on a simulated accelerator: order, outcome in other orders, waits of the host, memory."""

from __future__ import annotations

import pytest

from bed.accelerator import run_simulated
from programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_has_the_same_outcome(name):
    size, program = PROGRAMS[name]
    run_simulated(size, program, records=True)
