"""Options crossed: pairwise in the fast tier, random walks in the slow one."""

from __future__ import annotations

import itertools
import random

import pytest

from bed import ranks
from bed.sampling import few_fast, part_of
from scenario import (
    COMPOSABLE_SPACE,
    HYBRID_COMPOSABLE_SPACE,
    HYBRID_SPACE,
    REPLICATE_SPACE,
    SPACE,
    check,
    draw,
    name_of,
    pairwise,
)

DRAWS = 300
"""Scenarios of the random walk."""


TWO_RANKS = [
    *pairwise(SPACE, seed=1),
    *few_fast(pairwise(COMPOSABLE_SPACE, seed=3), 6),
    *few_fast(pairwise(REPLICATE_SPACE, seed=5), 14),
]
FOUR_RANKS = [
    *few_fast(pairwise(HYBRID_SPACE, seed=2)[::2], 3),
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


BLOCKS = {
    "accumulation": ["strategy", "use_orig_params", "backward_prefetch", "offload", "zeroing"],
    "checkpointing": ["strategy", "use_orig_params", "backward_prefetch", "wrapping"],
    "frozen": ["strategy", "use_orig_params", "backward_prefetch", "unfreeze", "input_grad"],
    "tied": ["strategy", "use_orig_params", "wrapping", "fault"],
}
"""Blocks of options of which a third of all combinations is run, or each (`part_of`), the others drawn."""


@pytest.mark.slow
@pytest.mark.parametrize("block", list(BLOCKS))
@ranks(2, timeout=900)
def test_cross_of_a_block(rank, world_size, block):
    generator = random.Random(7)
    names = [block, *BLOCKS[block]]
    for values in part_of(itertools.product(*(SPACE[name] for name in names)), 3):
        check(draw(SPACE, generator, dict(zip(names, values))), rank, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("space", [SPACE, COMPOSABLE_SPACE], ids=["wrapper", "fully_shard"])
@pytest.mark.parametrize("part", range(10))
@ranks(2, timeout=600)
def test_random_walk(rank, world_size, part, space):
    generator = random.Random(part)
    for _ in range(DRAWS // 10):
        check(draw(space, generator), rank, world_size)
