"""Gradients of `uneven` are those of the pooled batch: a plain model runs the batches of all ranks."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from bed import ranks
from bed.sampling import few_fast
from beside import assert_close_grads
from fronts import each_front, no_sync, twins
from fsdp_wrap import uneven
from fsdp_wrap.wrap import NameWrapPolicy
from scenario import COMPOSABLE_SPACE, HYBRID_SPACE, SPACE, UNEVEN, check, name_of, pairwise
from slopes import SLOPES, example, net, sum_backwards

CLOSE = {"rtol": 0.0, "atol": 1e-12}


TWO_RANKS = [
    *few_fast(pairwise({**SPACE, **UNEVEN}, seed=7), 5),
    *few_fast(pairwise({**COMPOSABLE_SPACE, **UNEVEN}, seed=8), 5),
]
FOUR_RANKS = few_fast(pairwise({**HYBRID_SPACE, **UNEVEN}, seed=9), 8)


@pytest.mark.parametrize("scenario", TWO_RANKS, ids=name_of)
@ranks(2)
def test_gradients_are_those_of_the_pooled_batch(rank, world_size, scenario):
    check(scenario, rank, world_size)


@pytest.mark.parametrize("scenario", FOUR_RANKS, ids=name_of)
@ranks(4)
def test_gradients_of_copies_are_those_of_the_pooled_batch(rank, world_size, scenario):
    check(scenario, rank, world_size)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("name", SLOPES)
@each_front
@ranks(2)
def test_backwards_for_inputs_alone_do_not_count(rank, world_size, front, name, accumulates, weighted):
    """Nor do they reduce what `no_sync` has left, or say that it was reduced."""
    plain, model = twins(front, net, torch.float64, auto_wrap_policy=NameWrapPolicy("Sequential"))
    places = [(0, 0), (1, 0), (1, 1), (1, 2)]
    weights = {place: 1.0 + (3 * place[0] + place[1]) * weighted for place in places}
    with uneven(model) as work:
        for place in places:

            def backward(loss: torch.Tensor, weight: float = weights[place]) -> None:
                work.backward(loss, weight if weighted else None)

            if place[0] == rank:
                with no_sync(model) if accumulates else nullcontext():
                    SLOPES[name](model, *example(*place), backward)
                torch.autograd.grad(model(x := example(*place)[0]).square().sum(), x)
    sum_backwards(plain, name, weights)
    assert_close_grads(model, plain, **CLOSE)
