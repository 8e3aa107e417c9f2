"""torch's `Join` with the wrapper, as with DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F

from bed import ranks
from beside import assert_close_grads, large_batch_backward
from fronts import assert_same_values, chosen, no_sync, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy
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
    assert not model._unit.step.plug_ins.align


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


class Net(nn.Module):
    """Two units, of which a forward may leave out the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x if skips else self.inner(x))


def example(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * rank + number)
    x, target = (torch.randn(5, size, generator=random, dtype=torch.float64) for size in (4, 3))
    return x, target


def fit(model: nn.Module, batch: Any, number: int, share: float, skips: bool = False) -> None:
    (F.mse_loss(model(batch[0], skips), batch[1]) * share).backward()


def fit_without_inner(model: nn.Module, batch: Any, number: int, share: float) -> None:
    fit(model, batch, number, share, skips=number == 2)


def fit_unsynced(model: nn.Module, batch: Any, number: int, share: float) -> None:
    with nullcontext() if number % 2 else no_sync(model):
        fit(model, batch, number, share)


def fit_twice(model: nn.Module, batch: Any, number: int, share: float) -> None:
    """Runs two backwards of one forward."""
    output = model(batch[0])
    (output.square().mean() * share).backward(retain_graph=True)
    (F.mse_loss(output, batch[1]) * share).backward()


def fit_smooth(model: nn.Module, batch: Any, number: int, share: float) -> None:
    """Penalizes gradients of inputs."""
    output = model(x := batch[0].requires_grad_())
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    ((F.mse_loss(output, batch[1]) + slope.square().mean()) * share).backward()


def fit_and_explain(model: nn.Module, batch: Any, number: int, share: float) -> None:
    """Ends with a backward that adds to no parameter."""
    fit(model, batch, number, share)
    torch.autograd.grad(model(x := batch[0].requires_grad_()).square().sum(), x)


class Loop(NamedTuple):
    """A loop: the backwards of a batch, after how many batches it steps, and how it clears gradients."""

    fit: Callable[[nn.Module, Any, int, float], None] = fit
    accumulates: int = 1
    drops: bool = True

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: Any, share: float) -> None:
        """Trains; `every` has the batches of some ranks for each number."""
        for number, batches in enumerate(every):
            for batch in batches:
                self.fit(model, batch, number, share)
            if (number + 1) % self.accumulates == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.drops)


LOOPS = {
    "gradients are dropped": Loop(),
    "gradients are zeroed, and a unit is left out": Loop(fit_without_inner, drops=False),
    "gradients are left": Loop(accumulates=3),
    "no_sync": Loop(fit_unsynced, accumulates=2),
    "two backwards of one forward": Loop(fit_twice),
    "penalty": Loop(fit_smooth),
    "gradients of inputs": Loop(fit_and_explain),
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("front", ["flat", "orig"])
@pytest.mark.parametrize("name", LOOPS)
@ranks(2, 4)
def test_epochs(rank, world_size, name, front, strategy):
    """Joined ranks leave the context with their parts of the gradients that the others have, or with none."""
    loop, counts = LOOPS[name], [1, 4, 2, 4][:world_size]
    options = chosen(front, strategy, world_size)
    pair: Any = twins(front, Net, torch.float64, auto_wrap_policy=NameWrapPolicy("Sequential"), **options)
    plain, model = pair
    optimizers = [optimizer_of(net) for net in (plain, model)]
    for epoch in range(2):
        every = [
            [example(other, 10 * epoch + number) for other, count in enumerate(counts) if number < count]
            for number in range(max(counts))
        ]
        loop.run(plain, optimizers[0], every, 1 / world_size)
        with Join([model], optimizer=optimizers[1]):
            own = [[example(rank, 10 * epoch + number)] for number in range(counts[rank])]
            loop.run(model, optimizers[1], own, 1.0)
        assert_same_values(model, plain, **CLOSE)
        assert_close_grads(model, plain, **CLOSE)


@pytest.mark.parametrize("scales", [False, True], ids=["clipping", "scaler"])
@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_a_step_with_gradients_that_joined_ranks_have_otherwise(rank, world_size, front, scales):
    _, model = pair(front)
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scales)
    with Join([model], optimizer=optimizer):
        for step in range([1, 2][rank]):
            scaler.scale(loss_of(model, tokens(rank, step))).backward()
            scaler.unscale_(optimizer)
            if not scales:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step == 0:
                optimizer.step()  # all ranks do alike
            else:
                told = r"were written to \(clipping, a scaler\) before SGD.step\(\) inside Join on rank 1"
                with pytest.raises(RuntimeError, match=told):
                    optimizer.step()
            scaler.update()
            optimizer.zero_grad()


@ranks(2)
def test_models_that_share_a_unit(rank, world_size):
    unit = FSDP(nn.Linear(4, 4))
    models = [FSDP(nn.Sequential(unit, nn.Linear(4, 4))) for _ in range(2)]
    for model in models:
        model(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"unit '0' is part of the root unit .* use uneven\(\) with both"):
        Join([models[0]])
