"""Derivatives of derivatives, graphs that outlive what follows them, and leaves that are freed meanwhile.

And transforms of `torch.func` over sharded models: by inputs, and backward into the parameters after them.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import func, nn

from bed import ranks
from beside import assert_close_grads, mean_backward
from fronts import FRONTS, FULL, KEPT, assert_sharded, either_front, shard, twins
from fsdp_wrap import ShardingStrategy, replicate
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block

PER_LAYER = ModuleWrapPolicy({nn.Linear})


def make_net() -> nn.Module:
    """The third layer is frozen: its leaf is saved, and no gradient of its own tells when it is done."""
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 5), nn.Linear(5, 1)]
    layers[4].requires_grad_(False)
    return nn.Sequential(*layers)


def pair(front: str, strategy: ShardingStrategy = FULL, make: Callable[[], nn.Module] = make_net) -> Any:
    """A plain net, and one with a unit for each layer."""
    return twins(front, make, torch.float64, auto_wrap_policy=PER_LAYER, sharding_strategy=strategy)


def inputs(seed: int = 1) -> torch.Tensor:
    """Random numbers that need a gradient; the same on all ranks, and so are the averaged gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()


def slope_of(out: torch.Tensor, x: torch.Tensor, create_graph: bool = True) -> torch.Tensor:
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=create_graph, retain_graph=True)
    return slope


def product_with_the_jacobian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two backwards, of which the second goes through the gradient that entered the first."""
    _, product = torch.autograd.functional.jvp(model, x, torch.ones_like(x), create_graph=True)
    model(inputs(2))
    return product.square().sum()


def hessian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    matrix = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x, create_graph=True)
    model(inputs(2))
    return matrix.square().sum()


LOSSES = [product_with_the_jacobian, hessian]


class _Force(nn.Module):
    """Returns the derivative of what its layers compute."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return slope_of(self.energy(x), x)


@either_front
@ranks(1, 2)
def test_derivatives_of_derivatives_outlive_what_comes_between(rank, world_size, front):
    for strategy in (FULL, KEPT):
        plain, model = pair(front, strategy)
        for loss_of in LOSSES:
            grads = []
            for net in (plain, model):
                x = inputs()
                loss_of(net, x).backward()
                grads.append(x.grad)
            torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12, msg=loss_of.__name__)
        assert_close_grads(model, plain, rtol=1e-10, atol=1e-10)
    plain, model = pair(front, make=_Force)  # a derivative inside of forward
    for net in (plain, model):
        first, _ = net(inputs()), net(inputs(2))
        first.square().sum().backward()
    assert_close_grads(model, plain)


def refusal(backward: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        backward()
    return str(caught.value)


@ranks(2)
def test_a_backward_after_a_step_is_refused_by_name(rank, world_size):
    for front, second_order in [(front, way) for front in FRONTS for way in (False, True)]:
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
            assert word in said, (front, second_order, said)
        model(x).sum().backward()  # still of use
        optimizer.step()
    for front in ("flat", "orig"):  # leaves that are the shards
        model = shard(front, make_net().double(), sharding_strategy=ShardingStrategy.NO_SHARD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(inputs()).sum().backward()
        loss = model(inputs()).sum()
        optimizer.step()
        assert "between forward and backward" in refusal(loss.backward)


@ranks(2)
def test_a_step_of_other_parameters_is_no_change(rank, world_size):
    """As a generator's backward goes on after its critic has stepped."""
    plain, model = pair("orig")
    for net in (plain, model):
        made = net(inputs())
        critic: nn.Module = nn.Linear(1, 1).double()
        if net is model:
            critic = shard("orig", critic, sharding_strategy=FULL)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        critic(made.detach()).sum().backward()
        optimizer.step()
        net(inputs())
        made.sum().backward()
    assert_close_grads(model, plain)


# transforms


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


def batches(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dist.get_world_size(), 2, WIDTH, dtype=torch.float64, generator=generator)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def assert_transformed_alike(model: nn.Module, plain: nn.Module) -> None:
    x = batches(0)[dist.get_rank()]
    for transform in TRANSFORMS.values():
        with torch.no_grad():
            assert_close(transform(model, x), transform(plain, x))
        assert_close(transform(model, x), transform(plain, x))
        assert_sharded(model)


def assert_steps_alike(model: nn.Module, plain: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
    """Steps that go backward from a transform, and ordinary ones between them."""
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.001) for net in (model, plain)]
    for step in range(3):
        x = batches(step)
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
def test_by_batches(rank, world_size):
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
        x = batches(0)
        own = total(model)(x[rank])
        func.vmap(model)(x[rank])
        own.backward()
        mean_backward(lambda rank: total(plain)(x[rank]))  # noqa: B023
        assert_close_grads(model, plain, rtol=0)


@either_front
@ranks(2)
def test_backward_after_a_transform(rank, world_size, front):
    for name in ("jvp", "grad", "vmap", "grad_of_each"):

        def loss(net: nn.Module, x: torch.Tensor, name: str = name) -> torch.Tensor:
            output = TRANSFORMS[name](net, x)
            return (output if isinstance(output, torch.Tensor) else sum(output)).square().sum()

        plain, model = twins(front, make_stack, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert_steps_alike(model, plain, loss)


class ReadsAgain(nn.Module):
    """Computes with the weight of a layer after the layer's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.inner(x)).tanh() @ self.inner.weight)


@ranks(2)
def test_what_stays_full_serves_modules_around_it(rank, world_size):
    """As outside of transforms; in the next one, and in backwards from it, too."""
    for front in (*FRONTS, "replicate"):
        plain: nn.Module
        model: nn.Module
        if front == "replicate":
            torch.manual_seed(0)
            plain = ReadsAgain().double()
            model = copy.deepcopy(plain)
            replicate(model.inner)
            replicate(model)
        else:
            plain, model = twins(
                front,
                ReadsAgain,
                torch.float64,
                auto_wrap_policy=PER_LAYER,
                sharding_strategy=KEPT,
            )
        assert_transformed_alike(model, plain)
        assert_steps_alike(model, plain, lambda net, x: func.vmap(net)(x).square().sum())


@ranks(2)
def test_parameters_written_inside_are_refused(rank, world_size):
    model = shard("orig", nn.Sequential(Clamped(WIDTH, 3)), ModuleWrapPolicy({Clamped}))
    with pytest.raises(RuntimeError, match=rf"unit '0' wrote to the parameter '0.weight'.* on rank {rank}, "):
        func.vmap(model)(torch.ones(2, WIDTH))
    assert_sharded(model)
