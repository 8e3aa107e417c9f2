"""A parameter that a graph uses outside of its module's forward: the gradient is right, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import count_collectives
from composable import trace
from fronts import FULL, KEPT, each_front, full, full_grads, inner, shard
from fsdp_wrap import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    record_events,
    replicate,
)
from fsdp_wrap.wrap import ModuleWrapPolicy
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


def assert_same_gradients(plain: nn.Module, model: nn.Module, world_size: int, **tolerance: Any) -> None:
    found = full_grads(model)
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(grad)
        torch.testing.assert_close(found[name], grad / world_size, **tolerance)
    for module in (plain, model):
        module.zero_grad()


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
    tolerance: dict[str, Any] = {"rtol": 0.05, "atol": 0.1} if options == "mixed" else {}
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


class Used(nn.Module):
    """Three units, and the root; a way of using parameters outside of their module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = Embed(WIDTH, WIDTH), Block(), Head(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.way: Way = tied

    def forward(self, x):
        return self.way(self, x) * self.scale

    def run(self, x):
        return self.head(self.block(self.embed(x)))


class Embed(nn.Linear):
    """A unit of its own."""


class Head(nn.Linear):
    """Another."""


Way = Callable[[Used, torch.Tensor], torch.Tensor]


def weight_of(module: nn.Module) -> torch.Tensor:
    return inner(module).weight


def tied(net, x):
    return F.linear(net.run(x), weight_of(net.embed))


def tied_by_call(net, x):
    out = net.run(x)
    params = {"weight": weight_of(net.embed), "bias": net.scale}
    return functional_call(nn.Linear(WIDTH, WIDTH), params, out)


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


def instead(net, x):
    return F.linear(net.block(net.embed(x)), weight_of(net.head))


def before(net, x):
    return net.run(F.linear(x, weight_of(net.embed)))


def whole(net, x):
    return F.linear(net.block(net.embed(x)), full(weight_of(net.head)))


def whole_and_run(net, x):
    return F.linear(net.run(x), full(weight_of(net.head)))


def in_loss(net, x):
    return net.run(x)


WAYS = (tied, tied_by_call, tied_in_hook, tied_in_checkpoint, instead, before, whole, whole_and_run, in_loss)
KEPT_SERVES = (tied, tied_by_call, tied_in_hook, tied_in_checkpoint, whole_and_run, in_loss)
"""Those that are right where units keep their parameters: these are used after their forward."""
MIXED = "mixed torch.Tensor and DTensor"


def refusal_of(way: Way, front: str, sharding: str, mode: str) -> str | None:
    """What refuses a way, if anything does; all else must be right."""
    if sharding == "none" and front != "composable":
        return None  # all ranks have all parameters, and show them
    if way in (whole, whole_and_run) and front == "composable":
        return None
    after = KEPT_SERVES if mode not in CONTEXTS else KEPT_SERVES[:-1]
    if sharding != "full" and way in after:
        return None
    if way is in_loss or sharding == "none":  # where nobody can add a name
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


def forwards_between(module: Any, batch: torch.Tensor) -> None:
    """Other forwards before a backward, with gradients and without."""
    for context in (nullcontext, *CONTEXTS.values()):
        with context():
            module(batch)


@pytest.mark.parametrize("mode", ["train", "between", "frozen", *CONTEXTS])
@pytest.mark.parametrize("sharding", ["full", "kept", "none"])
@each_front
@ranks(2)
def test_every_way_is_right_or_refused(rank, world_size, front, sharding, mode):
    torch.manual_seed(0)
    plain = Used().double()
    batch = batch_of(rank)

    def loss_of(module: Any, way: Way) -> torch.Tensor:
        net = inner(module)
        net.way = way
        out = module(batch)
        return (F.linear(out, weight_of(net.head)) if way is in_loss else out).square().sum()

    model = sharded_as(front, plain, sharding)
    for module in (plain, inner(model)) if mode == "frozen" else ():
        module.embed.requires_grad_(False), module.head.requires_grad_(False)
    for way in WAYS:
        refusal = refusal_of(way, front, sharding, mode)
        with CONTEXTS.get(mode, nullcontext)():
            expected = loss_of(plain, way)
            if refusal is not None:
                with pytest.raises(RuntimeError, match=refusal):
                    loss_of(model, way)
                continue
            loss = loss_of(model, way)
        torch.testing.assert_close(loss, expected)
        if mode == "between":
            forwards_between(model, batch)
        if mode not in CONTEXTS:
            expected.backward(), loss.backward()
            assert_same_gradients(plain, model, world_size)
        for module in (plain, model):
            module.zero_grad()


@each_front
@ranks(2)
def test_forwards_before_the_backward_of_what_is_kept(rank, world_size, front):
    """The backward gathers nothing; other values are seen by forwards, and refused by the backward."""
    torch.manual_seed(0)
    plain = Used().double()
    model, batch = sharded_as(front, plain, "kept"), batch_of(rank)
    loss = model(batch).square().sum()
    forwards_between(model, batch)
    with count_collectives(objects=False) as traffic:
        loss.backward()
    assert not any("gather" in name for name in traffic)
    plain(batch).square().sum().backward()
    assert_same_gradients(plain, model, world_size)
    with torch.no_grad():
        for unseen in (False, True):
            with torch.enable_grad():
                loss = model(batch).square().sum()
            for param in (*model.parameters(), *plain.parameters()):
                (param.data if unseen else param).mul_(2)
            torch.testing.assert_close(model(batch), plain(batch))
            if not unseen:
                with pytest.raises(
                    RuntimeError, match="between forward and backward|by an inplace operation"
                ):
                    loss.backward()
