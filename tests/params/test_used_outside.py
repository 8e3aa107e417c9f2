"""A parameter that a graph uses outside of its module's forward: the gradient is right, or it is refused.

A forward that returns one, or a view of one, gives a copy.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fronts
from bed import ranks
from bed.references import count_collectives
from fronts import FULL, KEPT, each_front, either_front, full, inner, shard
from fsdp_wrap import ShardingStrategy, replicate
from fsdp_wrap._params import FREED_VERSION
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Around, Block, Middle
from params.beside_plain import assert_mean_gradients, batch_of, losses, step_beside, zero


class Used(nn.Module):
    way: Way

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = Embed(WIDTH, WIDTH), Block(), Head(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.way(self, x) * self.scale

    def run(self, x):
        return self.head(self.block(self.embed(x)))


class Embed(nn.Linear): ...


class Head(nn.Linear): ...


Way = Callable[[Used, torch.Tensor], torch.Tensor]


def weight_of(module: nn.Module) -> torch.Tensor:
    return inner(module).weight


def tied_in_hook(net, x):
    hook = inner(net.head).register_forward_hook(lambda head, args, out: F.linear(out, weight_of(net.embed)))
    try:
        return net.run(x)
    finally:
        hook.remove()


def tied_in_checkpoint(net, x):
    def tail(out):
        return F.linear(out, weight_of(net.embed)).tanh()

    out = checkpoint(tail, net.run(x), use_reentrant=False)
    return checkpoint(tail, out, use_reentrant=True)


WAYS: dict[str, Way] = {
    "tied": lambda net, x: F.linear(net.run(x), weight_of(net.embed)),
    "tied in hook": tied_in_hook,
    "tied in checkpoint": tied_in_checkpoint,
    "instead": lambda net, x: F.linear(net.block(net.embed(x)), weight_of(net.head)),
    "before": lambda net, x: net.run(F.linear(x, weight_of(net.embed))),
    "whole": lambda net, x: F.linear(net.block(net.embed(x)), full(weight_of(net.head))),
    "whole and run": lambda net, x: F.linear(net.run(x), full(weight_of(net.head))),
    "in loss": lambda net, x: net.run(x),
}
KEPT_SERVES = ("tied", "tied in hook", "tied in checkpoint", "whole and run", "in loss")
"""Those that are right where units keep their parameters: these are used after their forward."""
MIXED = "mixed torch.Tensor and DTensor"


def refusal_of(way: str, front: str, sharding: str, mode: str) -> str | None:
    """Returns the error that refuses a way, or None where the gradient must be right."""
    if sharding == "none" and front != "composable":
        return None  # all ranks have all parameters, and show them
    if "whole" in way and front == "composable":
        return None
    after = KEPT_SERVES if mode not in CONTEXTS else KEPT_SERVES[:-1]
    if sharding != "full" and way in after:
        return None
    if way == "in loss" or sharding == "none":  # where nobody can add a name
        return MIXED if front == "composable" else "size mismatch|must be a matrix|1-D"
    return rf"{MIXED}[\s\S]*' or another of .*rank" if front == "composable" else r"'(head|embed)\.weight'"


def sharded_as(front: str, plain: Used, sharding: str) -> Any:
    model: Any = copy.deepcopy(plain)
    if (front, sharding) != ("composable", "none"):
        strategy = {"full": FULL, "kept": KEPT, "none": ShardingStrategy.NO_SHARD}[sharding]
        return shard(front, model, ModuleWrapPolicy({Embed, Head, Block}), sharding_strategy=strategy)
    for unit in (model.embed, model.block, model.head, model):
        replicate(unit)
    return model


CONTEXTS = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("sharding", ["full", "kept", "none"])
@each_front
@ranks(2)
def test_every_way_is_right_or_refused(rank, world_size, front, sharding):
    modes = ["train", "between", "frozen", *CONTEXTS]
    for mode in modes if front != "flat" else modes[:1]:
        torch.manual_seed(0)
        plain = Used().double()
        model = sharded_as(front, plain, sharding)
        for module in (plain, inner(model)) if mode == "frozen" else ():
            module.embed.requires_grad_(False), module.head.requires_grad_(False)
        for way in WAYS:
            check_way(way, mode, plain, model, batch_of(rank), front, sharding)


def check_way(way, mode, plain, model, batch, front, sharding):
    refusal = refusal_of(way, front, sharding, mode)

    def loss_of(module: Any) -> torch.Tensor:
        net = inner(module)
        net.way = WAYS[way]
        out = module(batch)
        return (F.linear(out, weight_of(net.head)) if way == "in loss" else out).square().sum()

    with CONTEXTS.get(mode, nullcontext)():
        expected = loss_of(plain)
        if refusal is not None:
            with pytest.raises(RuntimeError, match=refusal):
                loss_of(model)
            return
        loss = loss_of(model)
    torch.testing.assert_close(loss, expected)
    if mode == "between":
        for context in (nullcontext, *CONTEXTS.values()):
            with context():
                model(batch)
    if mode not in CONTEXTS:
        with count_collectives(objects=False) as traffic:
            loss.backward()
        if sharding == "kept" and "whole" not in way:
            assert not any("gather" in name for name in traffic)
        expected.backward()
        assert_mean_gradients(plain, model, (way, mode))
    zero(plain, model)


# what a unit computes and does not return


class Keeps(nn.Module):
    """Returns one tensor, and keeps another one, computed after it, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x):
        out = self.first(x)
        self.kept = self.second(out).tanh()
        return out


class UsesKept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.keeps = Embed(WIDTH, WIDTH), Keeps()

    def forward(self, x):
        out = self.keeps(self.stem(x))
        return out + inner(self.keeps).kept


@each_front
@ranks(2)
def test_a_gradient_that_enters_by_no_output_is_told_with_its_unit(rank, world_size, front):
    policy = ModuleWrapPolicy({Embed, Keeps})
    for strategy in (FULL, KEPT):
        plain, model = fronts.twins(
            front, UsesKept, torch.float64, auto_wrap_policy=policy, sharding_strategy=strategy
        )
        for _ in range(2):  # after the error, too
            expected, loss = losses(plain, model, batch_of(rank))
            if strategy is KEPT:
                expected.backward()
                loss.backward()
                assert_mean_gradients(plain, model)
                continue
            told = rf"(?s)at version {FREED_VERSION}.*entered unit 'keeps', or .* on rank {rank} by none"
            with pytest.raises(RuntimeError, match=told) as caught:
                loss.backward()
            assert str(caught.value).count("entered") == 1
            with pytest.raises(RuntimeError, match=told):
                x = batch_of(rank).requires_grad_()
                torch.autograd.grad(model(x).sum(), x)
        with torch.no_grad():
            torch.testing.assert_close(model(batch_of(rank)), plain(batch_of(rank)))
    weight = torch.ones(2, requires_grad=True)
    product = weight * weight
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="at version 1; expected version 0") as caught:
        product.sum().backward()
    assert "entered" not in str(caught.value)


# what is returned


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    weights: list[torch.Tensor]


RETURNED: dict[str, Callable[[nn.Linear, torch.Tensor], Any]] = {
    "parameter": lambda linear, out: (out, linear.weight),
    "row in a dict": lambda linear, out: {"out": out, "rows": [linear.weight[0]]},
    "twice": lambda linear, out: Output(out, [linear.bias, linear.weight, linear.bias]),
    "alone": lambda linear, out: linear.weight,
    "lent": lambda linear, out: (out, linear.weight),
}


class Giving(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return RETURNED[self.how](self.linear, self.linear(x))


class Returns(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.giving = nn.Linear(WIDTH, WIDTH), Giving(how)

    def forward(self, x):
        given = self.giving(self.first(x))
        return torch.tanh(given[0]) @ given[1] if inner(self.giving).how == "lent" else given


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Output):
        return [value.value, *value.weights]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


def loss_of_all(value: Any) -> Any:
    return sum(tensor.square().sum() * (1 + place) for place, tensor in enumerate(tensors_of(value)))


def returning(front: str, make: Any, strategy: ShardingStrategy) -> tuple[nn.Module, nn.Module]:
    policy = ModuleWrapPolicy({Giving})
    return fronts.twins(front, make, torch.float64, auto_wrap_policy=policy, sharding_strategy=strategy)


@each_front
@ranks(2)
def test_gradients_pass_through_the_copy(rank, world_size, front):
    strategies = (FULL, KEPT) if front == "composable" else (FULL, KEPT, ShardingStrategy.NO_SHARD)
    for strategy in strategies if front != "flat" else strategies[::2]:
        for how in RETURNED:
            plain, model = returning(front, partial(Returns, how), strategy)
            for step in range(2):
                expected, output = plain(batch_of(rank, step)), model(batch_of(rank, step))
                assert type(output) is type(expected) or how == "alone"
                loss_of_all(expected).backward()
                loss_of_all(output).backward()
                for one, other in zip(tensors_of(expected), tensors_of(output)):
                    torch.testing.assert_close(other.detach(), one.detach())  # after it was resharded
                assert_mean_gradients(plain, model, how)
                zero(plain, model)
            if how == "twice":
                assert output.weights[0] is output.weights[2]
    plain, model = returning(front, partial(Returns, "parameter"), FULL)
    with torch.no_grad():
        _, weight = model(batch_of(rank))
        torch.testing.assert_close(weight, plain.giving.linear.weight)
        weight.zero_()  # which stays with the copy
        torch.testing.assert_close(model(batch_of(rank))[0], plain(batch_of(rank))[0])
    assert not weight.requires_grad


# Between a forward that keeps its unit's parameters and the backward, attributes show them in full, while
# `parameters()` yields the sharded ones, which optimizers hold.


def models(front: str, make: Callable[[], nn.Module] = Around, **options: Any) -> tuple[Any, nn.Module]:
    options = options or {"sharding_strategy": KEPT}
    return fronts.twins(front, make, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Middle}), **options)


def root_kept(front: str, strategy: ShardingStrategy) -> dict[str, Any]:
    """The wrapper's root is kept whatever the strategy, and so is that of fully_shard by default."""
    if (front, strategy) == ("composable", FULL):
        return {"travel_together_bytes": None}
    return {"sharding_strategy": strategy}


def layers_of(model: Any) -> dict[str, nn.Linear]:
    net = inner(model)
    return {"first": net.first, "middle.linear": inner(net.middle).linear, "last": net.last}


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
    before, params = [layer.weight for layer in layers_of(model).values()], [*model.parameters()]
    for _ in range(2):
        loss = model(batch_of(rank)).sum()
        assert all(shown()) and all(map(operator.is_, model.parameters(), params))
        taken = {name: layer.weight for name, layer in layers_of(model).items()}
        loss.backward()
        assert all(layer.weight is kept for layer, kept in zip(layers_of(model).values(), before))
        for name, layer in expected.items():
            torch.testing.assert_close(taken[name], layer.weight, msg="what somebody keeps stays readable")
    for _ in range(2):
        with torch.no_grad():
            model(batch_of(rank))
        assert not any(shown())
        model(batch_of(rank))
        assert all(shown())
    if front == "composable":
        model.reshard()
        inner(model).middle.reshard()
        assert not any(shown())
    step_beside(plain, model, rank)


def write(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.bias.clamp_(-0.01, 0.01)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "written": write,
    "data": lambda layer: setattr(layer.bias, "data", layer.bias.data.clone()),
    "replaced": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach().clone())),
}


@each_front
@ranks(2)
def test_changes_of_what_is_shown_are_refused(rank, world_size, front):
    message = rf"parameter 'middle.linear.bias' .* between forward and backward on rank {rank}"
    for how, change in CHANGES.items():
        plain, model = models(front)
        kept = inner(inner(model).middle).linear
        sharded = kept.bias
        loss = model(batch_of(rank)).sum()
        change(kept)
        with pytest.raises(AssertionError, match=message):
            loss.backward()
        step_beside(plain, model, rank, how)
        model(batch_of(rank))
        change(kept)
        error = ValueError if how == "replaced" else RuntimeError
        with pytest.raises(error, match=r"linear.bias' was (written to|replaced)"):
            model(batch_of(rank))
        if how == "replaced" and front == "flat":
            kept._parameters["bias"] = None
        elif how == "replaced":
            kept.bias = sharded
        step_beside(plain, model, rank, how)


def assert_own_gradient(plain: nn.Module, expected: Any, loss: Any, part: str, taken: Any) -> None:
    """`torch.autograd.grad` gives this rank's own gradient, reduced by no one."""
    (wanted,) = torch.autograd.grad(expected, layers_of(plain)[part].weight, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, taken, retain_graph=True)
    torch.testing.assert_close(grad, wanted)


def assert_backward_still_right(plain: nn.Module, model: nn.Module, expected: Any, loss: Any) -> None:
    expected.backward()
    loss.backward()
    assert_mean_gradients(plain, model)
    zero(plain, model)


@either_front
@ranks(2)
def test_gradients_of_what_the_forward_computed_with(rank, world_size, front):
    """Of what was taken in the forward, and of what it kept; autograd refuses sharded parameters."""
    for strategy in (FULL, KEPT):
        plain, model = models(front, sharding_strategy=strategy)
        for part in ("last", "middle.linear"):
            taken: list[nn.Parameter] = []
            layer = layers_of(model)[part]
            handle = layer.register_forward_pre_hook(lambda module, _, to=taken: to.append(module.weight))
            expected, loss = losses(plain, model, batch_of(rank))
            handle.remove()
            assert_own_gradient(plain, expected, loss, part, taken)
            assert_backward_still_right(plain, model, expected, loss)
    for strategy, part in ((FULL, "last"), (KEPT, "last"), (KEPT, "middle.linear")):
        plain, model = models(front, **root_kept(front, strategy))
        for _ in range(2):
            expected, loss = losses(plain, model, batch_of(rank))
            assert_own_gradient(plain, expected, loss, part, layers_of(model)[part].weight)
            assert_backward_still_right(plain, model, expected, loss)
    plain, model = models(front, **root_kept(front, FULL))
    expected, loss = losses(plain, model, batch_of(rank))
    with pytest.raises(RuntimeError, match="not have been used in the graph|does not require grad"):
        torch.autograd.grad(loss, layers_of(model)["middle.linear"].weight)
    assert_backward_still_right(plain, model, expected, loss)
