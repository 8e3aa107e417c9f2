"""Programs on a simulated accelerator: order, outcome in other orders, waits of the host, memory, overlap."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from bed.accelerator import run_simulated
from fronts import FRONTS
from fsdp_wrap import BackwardPrefetch
from stream_programs import BF16, NO_SHARD, PROGRAMS, one_step, products_beside, wrapped

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


def _step_by_step(rank, device, told, front, accumulates=False, **options):
    model = wrapped(front, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(6):
        one_step(model, optimizer, rank, step, accumulates)
        optimizer.zero_grad()
        told[rank].append(device.end_step())


def _steps(front, **options):
    """What the host waited for in each step of the first rank, and the peaks by stream."""
    told: tuple[list[Any], list[Any]] = ([], [])
    run_simulated(2, partial(_step_by_step, told=told, front=front, **options))
    return told[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "accumulation": {"accumulates": True},
    "mixed_precision": {"mixed_precision": BF16},
    "no_shard": {"sharding_strategy": NO_SHARD},
    "forward_prefetch": {"forward_prefetch": True},
    "checkpointing": {"checkpoints": True},
}
ON_DEVICE = [
    (front, name)
    for front in FRONTS
    for name in OPTIONS
    if front != "composable" or name in ("nothing", "accumulation", "checkpointing")
]


@pytest.mark.parametrize(("front", "name"), ON_DEVICE)
def test_the_host_never_waits_and_every_step_has_the_same_peak(front, name):
    steps = _steps(front, **OPTIONS[name])
    assert not any(waits for waits, _ in steps[1:]), steps[1:]  # in the first, ranks compare the model
    peaks = [peaks for _, peaks in steps[2:]]
    assert all(each == peaks[0] for each in peaks), peaks


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
