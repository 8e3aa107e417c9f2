"""Options crossed on a GPU, against a plain model there: every value with every other, both front-ends."""

from __future__ import annotations

import itertools
import random

from on_cuda import by_device, mostly_on_cuda, over_the_group, place_of
from scenario import COMPOSABLE_SPACE, SPACE, check, draw, name_of, pairwise

SCENARIOS = [*pairwise(SPACE, seed=5), *pairwise(COMPOSABLE_SPACE, seed=6)]
WALKS, IN_EACH = 5, 4


@mostly_on_cuda("scenario", SCENARIOS, 25, name_of)
@by_device
def test_every_pair_of_options(rank, world_size, device, scenario):
    """One rank alone copies; every third time it calls its group as well, as several do."""
    place = place_of(device, rank)
    for over in (False, True)[: 1 + (SCENARIOS.index(scenario) % 3 == 1)]:
        with over_the_group(over):
            check(scenario, rank, world_size, device=place)


@mostly_on_cuda("walk", range(WALKS), WALKS, str)
@by_device
def test_random_walk(rank, world_size, device, walk):
    generator = random.Random(7000 + walk)
    place = place_of(device, rank)
    for number, space in itertools.product(range(IN_EACH), (SPACE, COMPOSABLE_SPACE)):
        with over_the_group(number % 2 == 0):
            check(draw(space, generator), rank, world_size, device=place)


def test_scenarios_are_many_enough():
    """Each strategy, offload, tying and checkpointing is there."""
    for name in ("strategy", "offload", "tied", "checkpointing", "frozen", "fault", "accumulation"):
        assert {each[name] for each in SCENARIOS if name in each} == {*SPACE[name]}, name
    assert {each.get("front", "wrapper") for each in SCENARIOS} == {"wrapper", "fully_shard"}
