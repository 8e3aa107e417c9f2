"""The runtime on a simulated accelerator: nothing touches the same bytes without an event in between."""

from __future__ import annotations

import random

import pytest

from bed.accelerator import run_simulated
from scenario import COMPOSABLE_SPACE, HYBRID_COMPOSABLE_SPACE, HYBRID_SPACE, SPACE, Scenario, check, draw, name_of


def _draws(space, number, seed):
    generator = random.Random(seed)
    return [draw(space, generator) for _ in range(number)]


def _check(scenario: Scenario, size: int, records: bool = True) -> None:
    run_simulated(size, lambda rank, device: check(scenario, rank, size, device.aside), records)


@pytest.mark.parametrize("scenario", [*_draws(SPACE, 8, 1), *_draws(COMPOSABLE_SPACE, 8, 2)], ids=name_of)
def test_options(scenario):
    _check(scenario, 2)


@pytest.mark.parametrize("scenario", [*_draws(HYBRID_SPACE, 3, 1), *_draws(HYBRID_COMPOSABLE_SPACE, 3, 2)], ids=name_of)
def test_hybrid(scenario):
    _check(scenario, 4)
