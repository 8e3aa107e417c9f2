"""Programs on a simulated accelerator: order, outcome in other orders, waits of the host, memory, overlap."""

from __future__ import annotations

import pytest
import torch

from bed.accelerator import run_simulated
from fronts import FRONTS
from fsdp_wrap import BackwardPrefetch
from stream_programs import PROGRAMS, one_step, products_beside, wrapped

_BY_FRONT = [name.removesuffix("-flat") for name in PROGRAMS if name.endswith("-flat")]


def _marks(name):
    """Slow for all but one front-end, which takes turns; not for what only trains."""
    kind, _, front = name.rpartition("-")
    turn = _BY_FRONT.index(kind) if kind in _BY_FRONT and front in FRONTS else 0
    return pytest.mark.slow if turn and front != FRONTS[turn % len(FRONTS)] else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in PROGRAMS])
def test_every_order_has_the_same_outcome(name):
    size, program = PROGRAMS[name]
    run_simulated(size, program, records=True, seeds=1)


def _overlaps(kind, **options):
    """For each collective of a backward, how many matrix products may run beside it; of units alone."""
    found = []

    def program(rank, device):
        model = wrapped(**options, travel_together_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            one_step(model, optimizer, rank, step)
        found.append(device)

    run_simulated(2, program)
    actions = found[0].actions
    collectives = [each for each in actions if each.what == kind and each.where.endswith(", backward")]
    return products_beside(actions, collectives[len(collectives) // 2 :])


@pytest.mark.parametrize("front", FRONTS)
def test_gathers_and_reductions_run_beside_products(front):
    """A prefetch that is issued after the kernels of the unit before it would run beside none."""
    *earlier, last = _overlaps("reduce_scatter", front=front)
    assert all(earlier) and last == 0
    gathers = _overlaps("all_gather", front=front)
    assert sum(each > 0 for each in gathers) >= len(gathers) - 2, gathers
    if front != "composable":
        assert not any(_overlaps("all_gather", front=front, backward_prefetch=None))
        assert not all(_overlaps("all_gather", front=front, backward_prefetch=BackwardPrefetch.BACKWARD_POST))
