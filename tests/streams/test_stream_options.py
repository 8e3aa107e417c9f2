"""Options crossed on a simulated accelerator, as `test_options.py` crosses them on the CPU."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from bed.accelerator import Different, run_simulated, simulation
from bed.sampling import part_of
from fsdp_wrap._comm.lanes import _EventPending
from scenario import (
    COMPOSABLE_SPACE,
    HYBRID_COMPOSABLE_SPACE,
    HYBRID_SPACE,
    SPACE,
    STEPS,
    check,
    draw,
    name_of,
    reference,
)

_SPACES = {"wrapper": SPACE, "composable": COMPOSABLE_SPACE}
_HYBRID = {"wrapper": HYBRID_SPACE, "composable": HYBRID_COMPOSABLE_SPACE}


def _draws(space, number, seed, **fixed):
    generator = random.Random(seed)
    return [draw(space, generator, fixed) for _ in range(number)]


def _check(scenario, size, steps=STEPS):
    """Trains with nothing but the training on the device, and compares with a plain model elsewhere."""
    expected = reference(scenario, size, steps=steps)

    def program(rank, device):
        return check(scenario, rank, size, expected, device.aside)

    run_simulated(size, program, records=True, seeds=1)


FAST = [each for number, space in enumerate(_SPACES.values()) for each in _draws(space, 3, number)]


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


_MANY = [
    *((_SPACES[front], 10, 1000 + part, 2) for part in range(22) for front in _SPACES),
    *((_HYBRID[front], 3, 2000 + part, 4) for part in range(10) for front in _HYBRID),
]
"""500 draws: the space, how many of it, the seed, and the ranks."""
_PART = part_of(_MANY, 3)


@pytest.mark.slow
@pytest.mark.parametrize("many", range(len(_PART)))
def test_many_options_drawn(many):
    space, number, seed, size = _PART[many]
    for scenario in _draws(space, number, seed):
        _check(scenario, size, steps=2)
