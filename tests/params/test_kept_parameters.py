"""Between a forward that keeps its unit's parameters and the backward: attributes show them in full.

`parameters()` goes on yielding the sharded ones, which optimizers hold: nothing done to those is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from bed import ranks
from fronts import FULL, KEPT, each_front, full_grads, full_state, inner, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Around, Middle


class Hidden(Around):
    """Leaves the last layer to the loss, as fused losses of language models do."""

    def forward(self, x):
        return self.middle(self.first(x))


def models(front: str, make: Callable[[], nn.Module] = Around, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make().double()
    options = options or {"sharding_strategy": KEPT}
    return plain, shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Middle}), **options)


def layers_of(model: Any) -> dict[str, nn.Linear]:
    net = inner(model)
    return {"first": net.first, "middle.linear": inner(net.middle).linear, "last": net.last}


def batch_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64) + rank + step


def assert_same_gradients(plain: nn.Module, model: nn.Module, world_size: int) -> None:
    found = full_grads(model)
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        torch.distributed.all_reduce(grad)
        torch.testing.assert_close(found[name], grad / world_size)


def step_of(plain: nn.Module, model: nn.Module, rank: int, world_size: int) -> None:
    """One step of training, whose gradients must be those of the plain model."""
    plain.zero_grad()
    model.zero_grad()
    batch = batch_of(rank)
    plain(batch).square().sum().backward()
    model(batch).square().sum().backward()
    assert_same_gradients(plain, model, world_size)


@each_front
@ranks(2)
def test_attributes_show_the_full_values_until_the_backward(rank, world_size, front):
    plain, model = models(front)
    expected = layers_of(plain)

    def shown() -> list[bool]:
        return [
            layer.weight.shape == expected[name].weight.shape
            and type(layer.weight) is nn.Parameter
            and torch.equal(layer.weight, expected[name].weight)
            for name, layer in layers_of(model).items()
        ]

    assert not any(shown())
    before = [layer.weight for layer in layers_of(model).values()]
    for _ in range(2):
        loss = model(batch_of(rank)).sum()
        assert all(shown())
        loss.backward()
        assert all(layer.weight is kept for layer, kept in zip(layers_of(model).values(), before))
    with torch.no_grad():
        model(batch_of(rank))
    assert not any(shown())
    model(batch_of(rank))
    assert all(shown())
    with torch.no_grad():
        model(batch_of(rank))
    assert not any(shown())
    model(batch_of(rank))
    if front == "composable":
        model.reshard()
        inner(model).middle.reshard()
        assert not any(shown())
    step_of(plain, model, rank, world_size)


@each_front
@ranks(2)
def test_parameters_are_the_same_objects_all_the_time(rank, world_size, front):
    plain, model = models(front)
    before = [*model.parameters()]
    model(batch_of(rank)).sum().backward()
    loss = model(batch_of(rank)).square().sum()
    assert all(map(lambda one, other: one is other, model.parameters(), before))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, model)]
    model.zero_grad()  # forgets what the backward before has left
    loss.backward()
    assert all(map(lambda one, other: one is other, model.parameters(), before))
    step_of(plain, model, rank, world_size)
    for param in plain.parameters():
        torch.distributed.all_reduce(param.grad)
        param.grad /= world_size
    for optimizer in optimizers:
        optimizer.step()
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@each_front
@ranks(2)
def test_zeroing_and_freezing_between_forward_and_backward(rank, world_size, front):
    plain, model = models(front)
    model(batch_of(rank)).sum().backward()
    batch = batch_of(rank)
    expected, loss = plain(batch).square().sum(), model(batch).square().sum()
    model.zero_grad()
    expected.backward()
    loss.backward()
    assert_same_gradients(plain, model, world_size)
    for module in (plain, model):
        module(batch)
        for param in module.parameters():
            param.requires_grad_(False)
            param.grad = None
    assert not model(batch).requires_grad
    for module in (plain, model):
        module.requires_grad_(True)
    step_of(plain, model, rank, world_size)


@pytest.mark.parametrize("strategy", [FULL, KEPT], ids=["root_only", "all"])
@each_front
@ranks(2)
def test_a_loss_that_computes_with_a_layer_of_the_root(rank, world_size, front, strategy):
    options = {} if (front, strategy) == ("composable", FULL) else {"sharding_strategy": strategy}
    plain, model = models(front, Hidden, **options)
    for step in range(2):
        batch = batch_of(rank, step)
        for module in (plain, model):
            module.zero_grad()
            hidden, last = module(batch), inner(module).last
            (F.linear(hidden, last.weight, last.bias).square().sum() + last.weight.pow(2).sum()).backward()
        assert_same_gradients(plain, model, world_size)
        for module in (plain, model):
            module.zero_grad()
            loss = module(batch).square().sum()
            inner(module).last.weight.pow(2).sum().backward()  # which reaches no output of the unit
            loss.backward()
        assert_same_gradients(plain, model, world_size)


def write(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.bias.clamp_(-0.01, 0.01)


def replace_data(layer: nn.Linear) -> None:
    layer.bias.data = layer.bias.data.clone()


def replace(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(layer.bias.detach().clone())


@pytest.mark.parametrize("change", [write, replace_data, replace])
@each_front
@ranks(2)
def test_changes_of_what_is_shown_are_refused(rank, world_size, front, change):
    plain, model = models(front)
    kept = inner(inner(model).middle).linear
    sharded = kept.bias
    batch = batch_of(rank)
    message = rf"parameter 'middle.linear.bias' .* between forward and backward on rank {rank}"
    loss = model(batch).sum()
    change(kept)
    with pytest.raises(AssertionError, match=message):
        loss.backward()
    model.zero_grad()
    step_of(plain, model, rank, world_size)
    model(batch)
    change(kept)
    with pytest.raises(Exception, match=r"linear.bias' was (written to|replaced)") as raised:
        model(batch)
    if change is replace:
        assert isinstance(raised.value, ValueError)
        if front == "flat":
            kept._parameters["bias"] = None
        else:
            kept.bias = sharded
    else:
        assert isinstance(raised.value, RuntimeError)
    step_of(plain, model, rank, world_size)


@each_front
@ranks(2)
def test_what_somebody_has_kept_can_be_read_after_the_backward(rank, world_size, front):
    plain, model = models(front)
    for step in range(2):
        batch = batch_of(rank, step)
        plain.zero_grad()
        model.zero_grad()
        expected, loss = plain(batch).square().sum(), model(batch).square().sum()
        taken = {name: layer.weight for name, layer in layers_of(model).items()}
        expected.backward()
        loss.backward()
        for name, layer in layers_of(plain).items():
            torch.testing.assert_close(taken[name], layer.weight)
        assert_same_gradients(plain, model, world_size)


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "state_dict": lambda model: model.state_dict(),
    "parameters": lambda model: [param.detach().clone() for param in model.parameters()],
}


@pytest.mark.parametrize("call", CALLS)
@each_front
@ranks(2)
def test_calls_between_forward_and_backward(rank, world_size, front, call):
    plain, model = models(front)
    batch = batch_of(rank)
    expected, loss = plain(batch).square().sum(), model(batch).square().sum()
    state = full_state(model) if call == "state_dict" else None
    other = CALLS[call](model)
    for name, param in (state or {}).items():
        torch.testing.assert_close(param, plain.state_dict()[name])
    expected.backward()
    loss.backward()
    assert_same_gradients(plain, model, world_size)
    if call == "deepcopy":
        assert all("weight" not in layer.__dict__ for layer in layers_of(other).values()) or front == "flat"
        step_of(plain, other, rank, world_size)


@each_front
@ranks(2)
def test_loading_after_a_forward_without_backward(rank, world_size, front):
    plain, model = models(front)
    model(batch_of(rank))
    state = {name: value * 2 for name, value in model.state_dict().items()} if front == "composable" else None
    if state is None:
        with FSDP.summon_full_params(model):
            for layer in layers_of(model).values():
                layer.weight.data.mul_(2)
                layer.bias.data.mul_(2)
    else:
        model.load_state_dict(state)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    step_of(plain, model, rank, world_size)


@each_front
@ranks(2)
def test_a_forward_that_failed_shows_the_sharded_ones(rank, world_size, front):
    plain, model = models(front)
    layer = inner(inner(model).middle).linear
    before = layer.weight
    hook = inner(model).last.register_forward_hook(lambda module, args, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch_of(rank))
    hook.remove()
    assert inner(model).first.weight.shape != (WIDTH, WIDTH) or front == "composable"
    step_of(plain, model, rank, world_size)
    assert layer.weight is before


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_what_every_rank_holds_may_be_edited(rank, world_size, front):
    plain, model = models(front, sharding_strategy=ShardingStrategy.NO_SHARD)
    batch = batch_of(rank)
    model(batch)
    with torch.no_grad():
        inner(model).last.weight.mul_(2)  # the shard itself
        plain.last.weight.mul_(2)
    step_of(plain, model, rank, world_size)


class Normed(Around):
    def __init__(self) -> None:
        super().__init__()
        self.last = parametrizations.weight_norm(self.last)


@each_front
@ranks(2)
def test_a_parametrised_tensor_of_what_is_shown(rank, world_size, front):
    plain, model = models(front, Normed)
    loss = model(batch_of(rank)).sum()
    torch.testing.assert_close(inner(model).last.weight, plain.last.weight)
    loss.backward()
    step_of(plain, model, rank, world_size)
