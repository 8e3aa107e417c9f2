"""Modules made by TorchScript are refused by name where they would be sharded, and run where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import full_state, inner, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.wrap import always_wrap_policy
from nets import WIDTH
from nets import Middle as Layer

COMPILERS: tuple[Any, ...] = (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, WIDTH)))
each_front = pytest.mark.parametrize("front", ["orig", "composable"])


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.register_buffer("by", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return self.act(x + self.by)


def two_nets(make: Callable[[nn.Module], nn.Module], cls: type[nn.Module]) -> list[nn.Sequential]:
    """Equal ones; a deep copy of a compiled module has no leaves."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), make(cls()), nn.Linear(WIDTH, WIDTH)))
    return nets


def assert_trains(plain: nn.Module, model: nn.Module) -> None:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(dict(full_state(model)), dict(plain.state_dict()))


def refuse(wrap: Callable[[nn.Module], Any], module: nn.Module, *words: str) -> None:
    before = [(name, id(param)) for name, param in module.named_parameters()]
    with pytest.raises(TypeError) as raised:
        wrap(module)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert [(name, id(param)) for name, param in module.named_parameters()] == before, "half done"


@each_front
@ranks(2)
def test_parameters_of_compiled_modules_are_refused(rank, world_size, front):
    words = ["torch.jit.script", "torch.compile", "plain module", "ignored"]
    for make in COMPILERS:
        plain, net = two_nets(make, Layer)
        refuse(lambda net: shard(front, net), net, "'1.linear.weight'", *words)
        refuse(lambda root: shard(front, root), make(Layer()), "torch.jit.script", "plain module")
        left_out = [*net[1].parameters()]
        if front == "composable":
            refuse(lambda net: fully_shard(net[1]), net, "changes a module's class", "torch.jit.script")
            refuse(lambda net: fully_shard([net[0], net[1]]), net, "changes a module's class")
            assert_trains(plain, fully_shard(net, ignored_params={*left_out}))
        else:
            refuse(lambda net: shard(front, net, always_wrap_policy), net, "'1.linear.weight'", *words)
            assert_trains(plain, shard(front, net, always_wrap_policy, ignored_states=left_out))
    first = Layer()
    net = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), torch.jit.script(first))
    refuse(lambda net: shard(front, net), net, "'0.linear.weight'", "torch.jit.script")
    net[0] = shard(front, first)  # the compiled one computes with the former parameters still
    with pytest.raises(TypeError, match=r"'2\.linear\.weight'.*torch\.jit\.script"):
        shard(front, net)


@each_front
@ranks(2)
def test_compiled_modules_without_parameters_and_graph_modules_run_on(rank, world_size, front):
    for make in COMPILERS:
        plain, net = two_nets(make, Shift)
        if front == "composable":
            refuse(lambda net: fully_shard(net[1]), net, "changes a module's class")
            assert_trains(plain, fully_shard(net))
        else:
            model = shard(front, net, always_wrap_policy)
            assert isinstance(inner(model)[1], FSDP), "a unit as the policy wants"
            assert_trains(plain, model)
    for as_unit in (False, True):
        plain, net = two_nets(torch.fx.symbolic_trace, Layer)
        if as_unit:
            net[1] = shard(front, net[1])
        assert_trains(plain, shard(front, net))
