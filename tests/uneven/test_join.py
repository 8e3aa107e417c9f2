"""torch's `Join` with the wrapper, as with DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from bed import ranks
from beside import assert_close_grads, large_batch_backward
from fronts import assert_same_values, twins
from models import WRAPPINGS, Transformer, loss_of, tokens

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
BATCHES = [1, 4, 0, 2]


def pair(front: str) -> tuple[nn.Module, Any]:
    return twins(front, partial(Transformer, blocks=2), torch.float64, auto_wrap_policy=WRAPPINGS["block"]())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_plain(plain: nn.Module, batches: list[int], by_all: bool) -> None:
    """Steps with the sum over the ranks that have a batch, divided by the number of all or of these."""
    optimizer = optimizer_of(plain)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        optimizer.zero_grad()
        for rank in active:
            (loss_of(plain, tokens(rank, step)) / (len(batches) if by_all else len(active))).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those with a batch"])
@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2, 4)
def test_training_is_as_with_ddp(rank, world_size, front, by_all):
    plain, model = pair(front)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Join([model], divide_by_initial_world_size=by_all, optimizer=optimizer):
        for step in range(BATCHES[rank]):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
            scheduler.step()
    train_plain(plain, BATCHES[:world_size], by_all)
    assert_same_values(model, plain, **CLOSE)
    with torch.no_grad():  # and outside all is as before
        full = [model(tokens(0, 9)).sum().item() for _ in range(2)]
    assert full[0] == full[1]
    assert model._unit.schedule.joining is None


@ranks(2)
def test_evaluation(rank, world_size):
    plain, model = pair("orig")
    losses = []
    with torch.no_grad(), Join([model]):
        for step in range([1, 3][rank]):
            losses.append(loss_of(model, tokens(rank, step)))
    expected = [loss_of(plain, tokens(rank, step)) for step in range([1, 3][rank])]
    torch.testing.assert_close(losses, expected, **CLOSE)


@ranks(2)
def test_all_end_at_the_first_one_without_a_batch(rank, world_size):
    _, model = pair("orig")
    steps = 0
    with pytest.raises(RuntimeError, match="exhausted"):
        with Join([model], throw_on_early_termination=True):
            for step in range([2, 5][rank]):
                loss_of(model, tokens(rank, step)).backward()
                steps += 1
    assert steps == 2


@ranks(2)
def test_without_effect(rank, world_size):
    plain, model = pair("orig")
    with Join([model], enable=False):
        loss_of(model, tokens(rank, 0)).backward()
    large_batch_backward(plain, [0])
    assert_close_grads(model, plain, **CLOSE)


@ranks(2)
def test_an_optimizer_that_a_rank_does_not_know(rank, world_size):
    _, model = pair("orig")
    optimizer = optimizer_of(model)
    told = r"rank 0, .* as Join\(\[model\], optimizer=optimizer\)"
    with pytest.raises(RuntimeError, match=told), Join([model]):
        for step in range([0, 3][rank]):
            loss_of(model, tokens(rank, step)).backward()
            optimizer.step()
