"""Steps of `step_of` train as the plain model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel, Recipe, iter_full_params, record_events
from fsdp_wrap.tools import step_of
from nets import WIDTH, Block, net


def sharded(front: str) -> nn.Module:
    model = net(1)
    if front == "wrapper":
        return FullyShardedDataParallel(model, use_orig_params=True)
    return Recipe().apply(model, Block)


def batches(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("sync", ["last", pytest.param("every", marks=pytest.mark.slow)])
@ranks(2)
def test_both_front_ends_train_as_the_plain_model(rank, world_size, sync):
    plain = net(1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        seen = [batches(each, 2 * step + part) for each in range(2) for part in range(2)]
        (sum(plain(each).square().mean() for each in seen) / 4).backward()
        reference.step()
        reference.zero_grad()
    for front in ("fully_shard", "wrapper"):
        model = sharded(front)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        turn = iter(range(4))

        def loss(model=model, turn=turn):
            return model(batches(rank, next(turn))).square().mean()

        step_once = step_of(model, optimizer, loss, accumulation=2, sync=sync)
        step_once(), step_once()
        found = dict(iter_full_params(model))
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(found[name], expected.detach(), rtol=1e-12, atol=1e-12, msg=front)


@ranks(2)
def test_gradients_are_reduced_once_a_step_or_in_every_backward(rank, world_size):
    for sync, times in (("last", 1), ("every", 3)):
        model = Recipe(together=0).apply(net(1), Block)
        optimizer = torch.optim.SGD(model.parameters())
        step = step_of(model, optimizer, lambda model=model: model(batches(0, 0)).mean(), 3, sync=sync)  # type: ignore[misc]
        with record_events() as events:
            step()
        assert sum(event.kind.name == "REDUCE" for event in events) == times


def test_words_that_mean_nothing_are_refused():
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters())
    for words, message in (
        ({"accumulation": 0}, "accumulation must be at least 1, not 0"),
        ({"sync": "never"}, "sync must be 'last' or 'every', not 'never'"),
    ):
        with pytest.raises(ValueError, match=message):
            step_of(model, optimizer, lambda: torch.ones(()), **words)  # type: ignore[arg-type]
