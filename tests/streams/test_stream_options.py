"""Options crossed on a simulated accelerator, as `test_options.py` crosses them on the CPU."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from bed.accelerator import Different, run_simulated, simulation
from fsdp_wrap._comm.lanes import _EventPending
from fsdp_wrap._core.optimizers import optimizer_steps
from scenario import (
    COMPOSABLE_SPACE,
    HYBRID_COMPOSABLE_SPACE,
    HYBRID_SPACE,
    SPACE,
    STEPS,
    check,
    draw,
    name_of,
    pairwise,
    reference,
)


def _draws(space, number, seed, **fixed):
    generator = random.Random(seed)
    return [draw(space, generator, fixed) for _ in range(number)]


def _check(scenario, size, steps=STEPS):
    """Trains with nothing but the training on the device, and compares with a plain model elsewhere."""
    expected = reference(scenario, size, steps=steps)

    def program(rank, device):
        return check(scenario, rank, size, expected, device.aside)

    run_simulated(size, program, records=True, seeds=1)


FAST = [*_draws(SPACE, 3, 0), *_draws(COMPOSABLE_SPACE, 3, 1)]


@pytest.mark.parametrize("scenario", FAST, ids=name_of)
def test_options_drawn(scenario):
    _check(scenario, 2)


_SMALL = {"wrapping": "block", "accumulation": "F", "forwards": 1, "checkpointing": "none", "fault": None}
_SHARDED = [
    *_draws(SPACE, 1, 3, strategy="FULL_SHARD", evaluates=False, **_SMALL),
    *_draws(COMPOSABLE_SPACE, 1, 3, evaluates=False, **_SMALL),
]


@pytest.mark.parametrize("scenario", _SHARDED, ids=name_of)
def test_what_is_drawn_misses_a_wait(scenario):
    """By the order, and by the outcome where nobody looks at the order."""
    with mock.patch.object(_EventPending, "wait", lambda self: None):
        with pytest.raises(AssertionError, match="no event orders them"):
            _check(scenario, 2, steps=2)
        with mock.patch.object(simulation, "conflicts", lambda action: []), pytest.raises(Different):
            _check(scenario, 2, steps=2)


_PARTS = [
    *((space, 2, part, 4) for space in (SPACE, COMPOSABLE_SPACE) for part in range(4)),
    *((space, 4, part, 16) for space in (HYBRID_SPACE, HYBRID_COMPOSABLE_SPACE) for part in range(4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_PARTS)))
def test_every_two_options_meet(number, monkeypatch):
    """At two ranks all do; of copies that are sharded a quarter of the scenarios is trained."""
    monkeypatch.setattr(optimizer_steps, "_sees_wholes", lambda *_: False)  # nothing happens on the device
    space, size, part, parts = _PARTS[number]
    for scenario in pairwise(space, seed=31)[part::parts]:
        _check(scenario, size, steps=2)
