"""Options crossed: pairwise in the fast tier, random walks in the slow one."""

import random

import pytest

from bed import ranks, sampling
from bed.sampling import few_fast
from scenario import (
    COMPOSABLE_SPACE,
    HYBRID_COMPOSABLE_SPACE,
    HYBRID_SPACE,
    INITS,
    ORDERS,
    REPLICATE_SPACE,
    SPACE,
    check,
    draw,
    name_of,
    pairwise,
)

TWO_RANKS = [
    *pairwise({**SPACE, **INITS}, seed=1),
    *few_fast(pairwise({**COMPOSABLE_SPACE, **ORDERS}, seed=3), 6),
    *few_fast(pairwise(REPLICATE_SPACE, seed=5), 14),
]
FOUR_RANKS = [
    *few_fast(pairwise({**HYBRID_SPACE, **INITS}, seed=2), 6),
    *few_fast(pairwise(HYBRID_COMPOSABLE_SPACE, seed=4), 20),
]


@pytest.mark.parametrize("scenario", TWO_RANKS, ids=name_of)
@ranks(2)
def test_every_pair_of_options(rank, world_size, scenario):
    check(scenario, rank, world_size)


@pytest.mark.parametrize("scenario", FOUR_RANKS, ids=name_of)
@ranks(4)
def test_hybrid_with_other_options(rank, world_size, scenario):
    check(scenario, rank, world_size)


@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    "space", [{**SPACE, **INITS}, {**COMPOSABLE_SPACE, **ORDERS}], ids=["wrapper", "fully_shard"]
)
@pytest.mark.parametrize("part", range(5))
@ranks(2, timeout=600)
def test_random_walk(rank, world_size, part, space):
    """Each commit draws other scenarios."""
    generator = random.Random(f"{sampling.draw()} {part}")
    for _ in range(30):
        check(draw(space, generator), rank, world_size)
