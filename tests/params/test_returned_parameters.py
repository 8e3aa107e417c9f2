"""Forwards that return a parameter or a view of one: the caller gets a copy, with the plain gradients."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import FULL, KEPT, each_front, full_grads, inner, shard
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 4


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    weights: list[torch.Tensor]


RETURNED: dict[str, Callable[[nn.Linear, torch.Tensor], Any]] = {
    "parameter": lambda linear, out: (out, linear.weight),
    "transposed": lambda linear, out: (out, linear.weight.t()),
    "row in a dict": lambda linear, out: {"out": out, "rows": [linear.weight[0]]},
    "twice": lambda linear, out: Output(out, [linear.bias, linear.weight, linear.bias]),
    "alone": lambda linear, out: linear.weight,
}


class Giving(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return RETURNED[self.how](self.linear, self.linear(x))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.giving = nn.Linear(WIDTH, WIDTH), Giving(how)

    def forward(self, x):
        return self.giving(self.first(x))


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Output):
        return [value.value, *value.weights]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


def loss_of(value: Any) -> Any:
    return sum(tensor.square().sum() * (1 + place) for place, tensor in enumerate(tensors_of(value)))


def models(front: str, make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make().double()
    return plain, shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Giving}), **options)


def assert_same_gradients(plain: nn.Module, model: nn.Module, world_size: int) -> None:
    found = full_grads(model)
    for name, param in plain.named_parameters():
        if param.grad is None:
            assert found[name] is None or not found[name].any()
            continue
        torch.distributed.all_reduce(param.grad)
        torch.testing.assert_close(found[name], param.grad / world_size)


@pytest.mark.parametrize("how", RETURNED)
@pytest.mark.parametrize("strategy", [FULL, KEPT], ids=["resharded", "kept"])
@each_front
@ranks(2)
def test_gradients_pass_through_the_copy(rank, world_size, front, strategy, how):
    plain, model = models(front, lambda: Net(how), sharding_strategy=strategy)
    for _ in range(2):
        batch = torch.randn(3, WIDTH, dtype=torch.float64) + rank
        expected, output = plain(batch), model(batch)
        assert type(output) is type(expected) or how == "alone"
        loss_of(expected).backward()
        loss_of(output).backward()
        for one, other in zip(tensors_of(expected), tensors_of(output)):
            torch.testing.assert_close(other.detach(), one.detach())  # after the backward, which reshards
        assert_same_gradients(plain, model, world_size)
        plain.zero_grad()
        model.zero_grad()
    if how == "twice":
        assert output.weights[0] is output.weights[2]


@each_front
@ranks(2)
def test_a_parameter_that_is_all_that_there_is(rank, world_size, front):
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))

        def forward(self, x):
            return self.own

    model = shard(front, Alone())
    out = model(None)
    (out * (rank + 1)).sum().backward()
    assert out.item() == 1.5
    assert full_grads(model)["own"].item() == 1.5  # the mean of 1 and 2


@pytest.mark.parametrize("strategy", [FULL, KEPT], ids=["resharded", "kept"])
@each_front
@ranks(2)
def test_another_unit_computes_with_it(rank, world_size, front, strategy):
    class Lender(Net):
        def forward(self, x):
            out, weight = self.giving(self.first(x))
            return torch.tanh(out) @ weight

    plain, model = models(front, lambda: Lender("parameter"), sharding_strategy=strategy)
    batch = torch.randn(3, WIDTH, dtype=torch.float64) + rank
    plain(batch).square().sum().backward()
    model(batch).square().sum().backward()
    assert_same_gradients(plain, model, world_size)


@each_front
@ranks(2)
def test_without_gradients_an_edit_stays_with_the_copy(rank, world_size, front):
    plain, model = models(front, lambda: Net("parameter"))
    batch = torch.ones(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        _, weight = model(batch)
        torch.testing.assert_close(weight, plain.giving.linear.weight)
        weight.zero_()
        torch.testing.assert_close(model(batch)[0], plain(batch)[0])
    assert not weight.requires_grad


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_of_what_every_rank_holds(rank, world_size, front):
    plain, model = models(front, lambda: Net("parameter"), sharding_strategy=ShardingStrategy.NO_SHARD)
    batch = torch.randn(3, WIDTH, dtype=torch.float64) + rank
    for _ in range(2):
        loss_of(plain(batch)).backward()
        loss_of(model(batch)).backward()
    assert inner(model).giving is not None
    assert_same_gradients(plain, model, world_size)
