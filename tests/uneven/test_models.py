"""Several models inside one `uneven`: they may share units, and one loss may go through several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bed import ranks
from beside import assert_close_grads
from fronts import FRONTS, chosen, each_front, full_grads, shard
from fsdp_wrap import uneven

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
Pair = tuple[nn.Module, nn.Module]


def pairs(front: str, shares: bool, **options: Any) -> tuple[Pair, Pair]:
    """Returns two plain models, which may share their first part, and the same sharded."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(*size), nn.Tanh()).double() for size in [(4, 8), (4, 8), (8, 3), (8, 4)]]
    own = copy.deepcopy(parts)
    units = [shard(front, part, **options) for part in own[:2]]
    plain = nn.Sequential(parts[0], parts[2]), nn.Sequential(parts[not shares], parts[3])
    first = shard(front, nn.Sequential(units[0], own[2]), **options)
    return plain, (first, shard(front, nn.Sequential(units[not shares], own[3]), **options))


def example(rank: int, number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(5, 4, generator=random, dtype=torch.float64)


def in_turns(first: nn.Module, last: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    for model in (first, last):
        backward(model(x).square().mean())


def of_both(first: nn.Module, last: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(first(x).square().mean() + last(x).square().mean())


def through_both(first: nn.Module, last: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    """Trains as a generator does in front of its discriminator."""
    backward(last(F.pad(first(x), (0, 1))).square().mean())


def of_the_first(first: nn.Module, last: nn.Module, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(first(x).square().mean())


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("shares", [True, False], ids=["shares", ""])
@pytest.mark.parametrize("run", [in_turns, of_both, through_both, of_the_first])
@pytest.mark.parametrize("front", FRONTS)
@ranks(2, 4)
def test_gradients_are_those_of_the_pooled_batch(rank, world_size, front, run, shares, strategy, weighted):
    plain, models = pairs(front, shares, **chosen(front, strategy, world_size))
    weights = {
        (other, number): 1.0 + (2 * other + number) * weighted
        for other, count in enumerate([1, 3, 0, 2][:world_size])
        for number in range(count)
    }
    with uneven(*models) as work:
        for place, weight in weights.items():
            if place[0] == rank:
                run(*models, example(*place), lambda loss, weight=weight: work.backward(loss, weight))
    for place, weight in weights.items():
        share = weight / sum(weights.values())
        run(*plain, example(*place), lambda loss, share=share: (loss * share).backward())
    for model, expected in zip(models, plain):
        assert_close_grads(model, expected, **CLOSE)


@each_front
@ranks(2)
def test_sums_of_models_with_other_weights_have_no_one_mean(rank, world_size, front):
    _, models = pairs(front, shares=True)
    of_both(*models, example(rank, 0), torch.Tensor.backward)
    before = [full_grads(model) for model in models]
    told = r"unit '0' is part of the root unit .* and of another model, .* weigh 3 and 5 in total"
    with pytest.raises(ValueError, match=told), uneven(*models) as work:
        work.backward(models[0](example(rank, 1)).sum(), 1.0 + rank)
        work.backward(models[1](example(rank, 1)).sum(), 2.0 + rank)
    for model, grads in zip(models, before):
        own = full_grads(model)
        assert all(torch.equal(own[name], grad) for name, grad in grads.items())
