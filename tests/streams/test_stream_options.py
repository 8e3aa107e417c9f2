"""Options crossed on a simulated accelerator, as `test_options.py` crosses them on the CPU."""

from __future__ import annotations

import random
from functools import partial

import pytest

from bed.accelerator import run_simulated
from scenario import COMPOSABLE_SPACE, HYBRID_COMPOSABLE_SPACE, HYBRID_SPACE, SPACE, check, draw, name_of

_SPACES = {"wrapper": SPACE, "composable": COMPOSABLE_SPACE}
_HYBRID = {"wrapper": HYBRID_SPACE, "composable": HYBRID_COMPOSABLE_SPACE}


def _draws(space, number, seed):
    generator = random.Random(seed)
    return [draw(space, generator) for _ in range(number)]


def _check(scenario, size):
    """Trains with nothing but the training on the device, and compares with a plain model beside it."""

    def program(rank, device):
        check(scenario, rank, size, partial(device.aside))

    run_simulated(size, program, records=True, seeds=1)


FAST = [each for number, space in enumerate(_SPACES.values()) for each in _draws(space, 3, number)]


@pytest.mark.parametrize("scenario", FAST, ids=name_of)
def test_options_drawn(scenario):
    _check(scenario, 2)


_MANY = [
    *((_SPACES[front], 4, 1000 + part, 2) for part in range(20) for front in _SPACES),
    *((_HYBRID[front], 2, 2000 + part, 4) for part in range(10) for front in _HYBRID),
]


@pytest.mark.slow
@pytest.mark.parametrize("many", range(len(_MANY)))
def test_many_options_drawn(many):
    space, number, seed, size = _MANY[many]
    for scenario in _draws(space, number, seed):
        _check(scenario, size)
