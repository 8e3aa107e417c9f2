"""Transforms of `torch.func` over sharded models: by inputs, and backward into the parameters after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import func, nn

from bed import ranks
from fronts import FRONTS, FULL, KEPT, shard, twins
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block
from runtime.plain_gradients import assert_close_grads, mean_backward


class Energy(nn.Module):
    """Uses a transform of its own in forward, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 2)

    def forward(self, x):
        forces = func.grad(lambda x: self.block(x).square().sum())(x)
        return self.head(forces + self.block(x))


class Recurrent(nn.LSTM):
    def forward(self, x):  # type: ignore[override]
        return super().forward(x)[0]


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def make_stack() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def total(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: net(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jvp": lambda net, x: func.jvp(net, (x,), (x.cos(),)),
    "grad": lambda net, x: func.grad(total(net))(x),
    "vmap": lambda net, x: func.vmap(net)(x),
    "grad_of_each": lambda net, x: func.vmap(func.grad(total(net)))(x),
    "vjp": lambda net, x: func.vjp(net, x)[1](torch.ones(2, 3, dtype=x.dtype)),
    "jacrev": lambda net, x: func.jacrev(net)(x),
    "jacfwd": lambda net, x: func.jacfwd(net)(x),
    "hessian": lambda net, x: func.hessian(total(net))(x),
}


def inputs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), 2, WIDTH, dtype=torch.float64, generator=generator)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def assert_sharded(model: nn.Module) -> None:
    for unit in units_in(model).values():
        assert unit.handle is None or unit.handle.state.name == "SHARDED"
        assert not unit.running


def assert_transformed_alike(model: nn.Module, plain: nn.Module) -> None:
    x = inputs(0)[dist.get_rank()]
    for transform in TRANSFORMS.values():
        with torch.no_grad():
            assert_close(transform(model, x), transform(plain, x))
        assert_close(transform(model, x), transform(plain, x))
        assert_sharded(model)


def assert_steps_alike(model: nn.Module, plain: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
    """Steps that go backward from a transform, and ordinary ones between them."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.001) for net in (model, plain)]
    for step in range(3):
        x = inputs(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_now = loss if step != 1 else lambda net, x: total(net)(x)
        loss_now(model, x[dist.get_rank()]).backward()
        mean_backward(lambda rank: loss_now(plain, x[rank]))  # noqa: B023
        assert_close_grads(model, plain, rtol=0)
        for optimizer in optimizers:
            optimizer.step()
        assert_sharded(model)


@ranks(1, 2)
def test_by_inputs(rank, world_size):
    """Whatever came before: a transform that failed, or an ordinary forward that waits for its backward."""
    for front, strategy in (("flat", FULL), ("orig", KEPT), ("composable", FULL)):
        policy = ModuleWrapPolicy({Block})
        plain, model = twins(
            front, make_stack, torch.float64, auto_wrap_policy=policy, sharding_strategy=strategy
        )
        with pytest.raises(RuntimeError, match="shapes|size"):
            func.vmap(model)(torch.ones(2, 2, WIDTH + 1, dtype=torch.float64))
        assert_sharded(model)
        assert_transformed_alike(model, plain)
        x = inputs(0)
        own = total(model)(x[rank])
        func.vmap(model)(x[rank])
        own.backward()
        mean_backward(lambda rank: total(plain)(x[rank]))  # noqa: B023
        assert_close_grads(model, plain, rtol=0)


@pytest.mark.parametrize("front", ["orig", "composable"])
@ranks(2)
def test_backward_after_a_transform(rank, world_size, front):
    for name in ("jvp", "grad", "vmap", "grad_of_each"):

        def loss(net: nn.Module, x: torch.Tensor, name: str = name) -> torch.Tensor:
            found = TRANSFORMS[name](net, x)
            return (found if isinstance(found, torch.Tensor) else sum(found)).square().sum()

        plain, model = twins(front, make_stack, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert_steps_alike(model, plain, loss)


@ranks(2)
def test_transforms_in_the_root_s_forward_and_of_modules_with_lists_of_parameters(rank, world_size):
    def tangent(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return sum(func.jvp(net, (x,), (x.cos(),))).square().sum()

    for front in FRONTS:
        plain, model = twins(front, Energy, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert_steps_alike(model, plain, lambda net, x: total(net)(x))
        plain, model = twins(front, lambda: Recurrent(WIDTH, 3), torch.float64)
        assert_steps_alike(model, plain, tangent)


@ranks(2)
def test_parameters_written_inside_are_refused(rank, world_size):
    model = shard("orig", nn.Sequential(Clamped(WIDTH, 3)), ModuleWrapPolicy({Clamped}))
    with pytest.raises(RuntimeError, match=rf"unit '0' wrote to the parameter '0.weight'.* on rank {rank}, "):
        func.vmap(model)(torch.ones(2, WIDTH))
    assert_sharded(model)
