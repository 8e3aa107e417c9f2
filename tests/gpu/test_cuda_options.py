"""Options crossed on a GPU, against a plain model there: every value with every other, both front-ends."""

from __future__ import annotations

import random

from on_cuda import by_device, mostly_on_cuda, over_the_group, place_of
from scenario import COMPOSABLE_SPACE, SPACE, check, draw, name_of, pairwise

SCENARIOS = [*pairwise(SPACE, seed=5), *pairwise(COMPOSABLE_SPACE, seed=6)]


@mostly_on_cuda("scenario", SCENARIOS, 25, name_of)
@by_device
def test_every_pair_of_options(rank, world_size, device, scenario):
    check(scenario, rank, world_size, device=place_of(device, rank))


@mostly_on_cuda("scenario", SCENARIOS[1::3], 20, name_of)
@by_device
def test_over_collectives_of_the_group(rank, world_size, device, scenario):
    """One rank alone copies; here it calls what several call."""
    place = place_of(device, rank)
    with over_the_group():
        check(scenario, rank, world_size, device=place)


@mostly_on_cuda("seed", range(20), 20, str)
@by_device
def test_random_walk(rank, world_size, device, seed):
    generator = random.Random(7000 + seed)
    place = place_of(device, rank)
    for space in (SPACE, COMPOSABLE_SPACE):
        with over_the_group(seed % 2 == 0):
            check(draw(space, generator), rank, world_size, device=place)


def test_scenarios_are_many_enough():
    """Each strategy, offload, tying and checkpointing is there."""
    for name in ("strategy", "offload", "tied", "checkpointing", "frozen", "fault", "accumulation"):
        assert {each[name] for each in SCENARIOS if name in each} == {*SPACE[name]}, name
    assert {each.get("front", "wrapper") for each in SCENARIOS} == {"wrapper", "fully_shard"}
