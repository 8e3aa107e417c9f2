"""A parameter that a graph uses outside of its module's forward: the gradient is right, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bed import ranks
from composable import trace
from fronts import full_grads
from fsdp_wrap import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, record_events
from nets import WIDTH, Block


class Fused(nn.Module):
    """Computes with its head's weight, not by the head's forward."""

    recomputes: Callable[..., Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(WIDTH, WIDTH), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, whole: bool = False):
        hidden = self.block(self.embed(x))
        if whole:
            return self.head(self.norm(hidden))
        if self.recomputes is not None:
            return self.recomputes(self.tail, hidden)
        return self.tail(hidden)

    def tail(self, hidden):
        return F.linear(self.norm(hidden), self.head.weight) + self.head.bias


def grouped(plain: nn.Module, **options: Any) -> Any:
    """A sharded copy, with norm and head in one unit."""
    model: Any = copy.deepcopy(plain)
    for unit in (model.block, [model.norm, model.head], model):
        fully_shard(unit, **options)
    return model


def batch_of(rank: int, number: int = 0) -> torch.Tensor:
    torch.manual_seed(number * 10 + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64)


def assert_same_gradients(plain: nn.Module, model: nn.Module, world_size: int, **tolerance: float) -> None:
    found = full_grads(model)
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(grad)
        torch.testing.assert_close(found[name], grad / world_size, **tolerance)
    plain.zero_grad(), model.zero_grad()


OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "within 2": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@pytest.mark.parametrize("options", OPTIONS)
@ranks(2)
def test_modules_in_one_unit_of_which_one_does_not_run(rank, world_size, options):
    torch.manual_seed(0)
    plain = Fused().double()
    model = grouped(plain, **OPTIONS[options])
    tolerance = {"rtol": 0.05, "atol": 0.1} if options == "mixed" else {}
    shown = [*model.parameters()]
    ways = [None, partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)]
    for number, way in enumerate([*ways, *ways]):
        batches = [batch_of(rank, each) for each in range(number, number + 2)]
        for module in (plain, model):
            module.recomputes = way
            losses = [module(batch).square().sum() for batch in batches]
            with torch.no_grad():
                module(batches[0])
            for loss in reversed(losses) if number % 2 else losses:
                loss.backward()
        assert_same_gradients(plain, model, world_size, **tolerance)
        assert all(map(lambda one, other: one is other, model.parameters(), shown))
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                torch.testing.assert_close(
                    model(batches[0]), plain(batches[0]), check_dtype=False, **tolerance
                )
        for module in (plain, model):
            module(batches[0], whole=True).square().sum().backward()
        assert_same_gradients(plain, model, world_size, **tolerance)


@ranks(2)
def test_how_long_modules_in_one_unit_stay_full(rank, world_size):
    torch.manual_seed(0)
    plain = Fused().double()
    model = grouped(plain)
    batch = batch_of(rank)
    weight = model.head.weight

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def events_of(step: Callable[[], Any]) -> list[str]:
        with record_events() as events:
            step()
        return [line[0] for line in trace(events) if line.endswith("norm, head")]

    for _ in range(2):
        loss = model(batch).square().sum()
        assert model.head.weight is weight
        loss.backward()
        hook = model.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(batch)
        hook.remove()
        assert model.head.weight is weight
    model.zero_grad()
    step = [*"urupr"]
    assert events_of(lambda: model(batch).sum().backward()) == step
    assert events_of(lambda: model(batch, whole=True).sum().backward()) == step
    with torch.no_grad():
        assert events_of(lambda: model(batch)) == step[:2]
    model.zero_grad()
    for module in (plain, model):  # each for itself: nothing encloses them
        module.tail(batch).square().sum().backward()
    assert_same_gradients(plain, model, world_size)
    with torch.no_grad():
        torch.testing.assert_close(model.tail(batch), plain.tail(batch))
    for module in (plain, model):
        module(batch).square().sum().backward()
    assert_same_gradients(plain, model, world_size)
    model.norm.register_forward_hook(lambda norm, args, output: (output, model.head.weight))
    with pytest.raises(TypeError):
        model(batch)
    model.forward = lambda x: model.norm(x)
    kept = model(batch)[1]
    assert torch.equal(kept, plain.head.weight) and kept is not weight
