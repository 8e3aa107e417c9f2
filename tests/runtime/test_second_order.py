"""Derivatives of derivatives, graphs that outlive what follows them, and leaves that are freed meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import FULL, KEPT, each_front, full_grads, no_sync, shard, twins
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy

each_strategy = pytest.mark.parametrize("strategy", [FULL, KEPT], ids=["full", "kept"])
PER_LAYER = ModuleWrapPolicy({nn.Linear})


def make_net() -> nn.Module:
    """The third layer is frozen: its leaf is saved, and no gradient of its own tells when it is done."""
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 5), nn.Linear(5, 1)]
    layers[4].requires_grad_(False)
    return nn.Sequential(*layers)


def inputs(seed: int = 1) -> torch.Tensor:
    """Random numbers that need a gradient; the same on all ranks, and so are the averaged gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()


def slope_of(out: torch.Tensor, x: torch.Tensor, create_graph: bool = True) -> torch.Tensor:
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=create_graph, retain_graph=True)
    return slope


def forward_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = slope_of(model(x), x)
    model(inputs(2))
    return slope.square().sum()


def evaluation_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = slope_of(model(x), x)
    with torch.no_grad():
        model(inputs(2))
    return slope.square().sum()


def step_of_another_loss_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = slope_of(model(x), x)
    model(inputs(2)).sum().backward()
    return slope.square().sum()


def plain_derivative_between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = slope_of(model(x), x)
    slope_of(slope, x, create_graph=False)
    slope_of(model(x), x, create_graph=False)
    return slope.square().sum()


def third_order(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = slope_of(model(x), x)
    model(inputs(2))
    curvature = slope_of(slope, x)
    model(inputs(2))
    third = slope_of(curvature, x)
    model(inputs(2))
    return third.square().sum()


def product_with_the_jacobian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two backwards, of which the second goes through the gradient that entered the first."""
    _, product = torch.autograd.functional.jvp(model, x, torch.ones_like(x), create_graph=True)
    model(inputs(2))
    return product.square().sum()


def hessian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x, create_graph=True)
    model(inputs(2))
    return found.square().sum()


LOSSES = [
    forward_between,
    evaluation_between,
    step_of_another_loss_between,
    plain_derivative_between,
    third_order,
    product_with_the_jacobian,
    hessian,
]


@each_front
@each_strategy
@ranks(1, 2)
def test_derivatives_of_derivatives_outlive_what_comes_between(rank, world_size, front, strategy):
    plain, model = twins(
        front, make_net, torch.float64, auto_wrap_policy=PER_LAYER, sharding_strategy=strategy
    )
    for loss_of in LOSSES:
        found = []
        for net in (plain, model):
            x = inputs()
            loss_of(net, x).backward()
            found.append(x.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12, msg=loss_of.__name__)
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(grads[name], expected, rtol=1e-10, atol=1e-10)


class _Force(nn.Module):
    """Returns the derivative of what its layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return slope_of(self.energy(x), x)


@each_front
@ranks(2)
def test_a_derivative_inside_of_forward(rank, world_size, front):
    plain, model = twins(front, _Force, torch.float64, auto_wrap_policy=PER_LAYER)
    for net in (plain, model):
        first, _ = net(inputs()), net(inputs(2))
        first.square().sum().backward()
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(grads[name], expected, rtol=1e-12, atol=1e-12)


def refusal(backward: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        backward()
    return str(caught.value)


@each_front
@pytest.mark.parametrize("second_order", [False, True], ids=["first", "second"])
@ranks(2)
def test_a_backward_after_a_step_is_refused_by_name(rank, world_size, front, second_order):
    torch.manual_seed(0)
    model = shard(front, make_net().double(), auto_wrap_policy=PER_LAYER, sharding_strategy=FULL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = inputs()
    out = model(x)
    loss = slope_of(out, x).square().sum() if second_order else out.sum()
    model(x).sum().backward()
    optimizer.step()
    model(x)
    said = refusal(loss.backward)
    for word in ("unit '", f"between forward and backward on rank {rank}", "run the forward again"):
        assert word in said, said
    model(x).sum().backward()  # still of use
    optimizer.step()


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_leaves_that_are_the_shards_do_not_change_between_forward_and_backward(rank, world_size, front):
    model = shard(front, make_net().double(), sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).sum().backward()
    loss = model(inputs()).sum()
    optimizer.step()
    assert "between forward and backward" in refusal(loss.backward)


@each_front
@ranks(2)
def test_a_step_of_other_parameters_is_no_change(rank, world_size, front):
    """As a generator's backward goes on after its critic has stepped."""
    plain, model = twins(front, make_net, torch.float64, auto_wrap_policy=PER_LAYER, sharding_strategy=FULL)
    for net in (plain, model):
        made = net(inputs())
        critic: nn.Module = nn.Linear(1, 1).double()
        if net is model:
            critic = shard(front, critic, sharding_strategy=FULL)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        critic(made.detach()).sum().backward()
        optimizer.step()
        net(inputs())
        made.sum().backward()
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(grads[name], expected, rtol=1e-12, atol=1e-12)


@each_front
@ranks(2)
def test_what_a_hook_captured_inside_of_a_unit_reaches_no_freed_leaf(rank, world_size, front):
    """Outside of the contract; what autograd saved of leaves is refused, and the process lives."""
    block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    captured: list[torch.Tensor] = []
    block[2].register_forward_hook(lambda module, args, output: captured.append(output))
    outer = nn.Sequential(block, nn.Linear(6, 1).double())
    model = shard(front, outer, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), sharding_strategy=FULL)
    x = inputs()
    model(x)
    with torch.no_grad():
        model(x)
    assert "modified by an inplace operation" in refusal(captured[0].sum().backward)
    model(x).sum().backward()


OPERATIONS = ["forward", "evaluate", "slope", "backward", "no_sync", "step", "fail"]


class _Walk:
    """Some random operations on a model, all drawn alike for it and its plain twin."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self._draw = model, random.Random(seed)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._live: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with the input

    def go(self) -> list[Any]:
        said = []
        for _ in range(12):
            operation = self._draw.choices(OPERATIONS, [4, 1, 4, 3, 1, 0.5, 0.3])[0]
            numbers = [self._draw.random() for _ in range(3)]
            try:
                said.append(getattr(self, operation)(*numbers))
            except (RuntimeError, KeyError):
                said.append("failed")
                self._live.clear()
                self.evaluate(*numbers)
                self._optimizer.zero_grad()
        return said

    def forward(self, chosen: float, keeps: float, graph: float) -> Any:
        x = inputs(int(chosen * 1000))
        self._live.append((self.model(x), x))
        return self._live[-1][0].detach()

    def evaluate(self, chosen: float, keeps: float, graph: float) -> Any:
        with torch.no_grad():
            return self.model(inputs(int(chosen * 1000)))

    def slope(self, chosen: float, keeps: float, graph: float) -> Any:
        if not self._live:
            return None
        out, x = self._live[int(chosen * len(self._live))]
        options: dict[str, Any] = {"create_graph": graph < 0.7, "retain_graph": True if keeps < 0.7 else None}
        (slope,) = torch.autograd.grad(out.square().sum(), x, **options)
        if slope.requires_grad:
            self._live.append((slope, x))
        return slope.detach()

    def backward(self, chosen: float, keeps: float, graph: float) -> Any:
        if not self._live:
            return None
        out, x = self._live[int(chosen * len(self._live))]
        out.square().sum().backward(retain_graph=keeps < 0.6)
        return x.grad.clone()

    def no_sync(self, chosen: float, keeps: float, graph: float) -> Any:
        if type(self.model) is nn.Sequential:  # the plain one
            return self.backward(chosen, keeps, graph)
        with no_sync(self.model):
            return self.backward(chosen, keeps, graph)

    def step(self, chosen: float, keeps: float, graph: float) -> Any:
        self._live.clear()
        self.model(inputs()).sum().backward()
        self._optimizer.step()

    def fail(self, chosen: float, keeps: float, graph: float) -> Any:
        raise KeyError


@each_front
@each_strategy
@ranks(2)
def test_random_walks(rank, world_size, front, strategy):
    for seed in range(8):
        plain, model = twins(
            front, make_net, torch.float64, auto_wrap_policy=PER_LAYER, sharding_strategy=strategy
        )
        for expected, found in zip(_Walk(plain, seed).go(), _Walk(model, seed).go(), strict=True):
            if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
                torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, msg=f"seed {seed}")
            else:
                assert found == expected, seed
        model(inputs()).sum().backward()
        plain(inputs()).sum().backward()
        grads = full_grads(model)
        for name, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(grads[name], expected, rtol=1e-8, atol=1e-9)
