"""Modules made by TorchScript are refused by name where they would be sharded, and run where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import each_front, full_state, inner, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from nets import WIDTH
from nets import Middle as Layer


class Shift(nn.Module):
    """No parameters, but a child and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.register_buffer("by", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return self.act(x + self.by)


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.ones(2, WIDTH))


def fx(module: nn.Module) -> Any:
    return torch.fx.symbolic_trace(module)


each_compiler = pytest.mark.parametrize("make", [scripted, traced])


def net_around(middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))


def two_nets(make: Callable[[nn.Module], nn.Module], cls: type[nn.Module]) -> list[nn.Sequential]:
    """Equal ones; a deep copy of a compiled module has no leaves."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(net_around(make(cls())))
    return nets


def every_module(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


def shard_without(front: str, net: nn.Sequential, **options: Any) -> nn.Module:
    """Shards all but the middle."""
    if front == "composable":
        return fully_shard(net, ignored_params=set(net[1].parameters()))
    return FSDP(net, use_orig_params=front == "orig", ignored_states=[*net[1].parameters()], **options)


def assert_trains(plain: nn.Module, model: nn.Module) -> None:
    """Two steps on the same batch on all ranks."""
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for module in (plain, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    expected, found = plain.state_dict(), full_state(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def refuse(wrap: Callable[[nn.Module], Any], module: nn.Module, *words: str) -> None:
    before = [(name, id(param)) for name, param in module.named_parameters()]
    with pytest.raises(TypeError) as raised:
        wrap(module)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert [(name, id(param)) for name, param in module.named_parameters()] == before, "half done"


@each_compiler
@each_front
@ranks(2)
def test_parameters_of_compiled_modules_are_refused(rank, world_size, front, make):
    plain, net = two_nets(make, Layer)
    words = ["torch.jit.script", "torch.compile", "plain module", "ignored"]
    refuse(lambda net: shard(front, net), net, "'1.linear.weight'", *words)
    refuse(lambda root: shard(front, root), make(Layer()), "torch.jit.script", "plain module")
    if front == "composable":
        refuse(lambda net: fully_shard(net[1]), net, "changes a module's class", "torch.jit.script")
        refuse(lambda net: fully_shard([net[0], net[1]]), net, "changes a module's class")
        assert_trains(plain, shard_without(front, net))
    else:
        refuse(lambda net: shard(front, net, every_module), net, "'1.linear.weight'", *words)
        assert_trains(plain, shard_without(front, net, auto_wrap_policy=every_module))


@each_front
@ranks(2)
def test_a_parameter_that_a_compiled_module_shares(rank, world_size, front):
    first = Layer()
    net = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), scripted(first))
    refuse(lambda net: shard(front, net), net, "'0.linear.weight'", "torch.jit.script")
    net[0] = shard(front, first)  # the compiled one computes with the former parameters still
    with pytest.raises(TypeError, match=r"'2\.linear\.weight'.*torch\.jit\.script"):
        shard(front, net)


@each_compiler
@each_front
@ranks(2)
def test_compiled_modules_without_parameters_run_on(rank, world_size, front, make):
    plain, net = two_nets(make, Shift)
    if front == "composable":
        refuse(lambda net: fully_shard(net[1]), net, "changes a module's class")
        assert_trains(plain, fully_shard(net))
    else:
        model = shard(front, net, every_module)
        assert isinstance(inner(model)[1], FSDP), "a unit as the policy wants"
        assert_trains(plain, model)


@each_front
@ranks(2)
def test_graph_modules_shard_as_others(rank, world_size, front):
    plain, net = two_nets(fx, Layer)
    assert_trains(plain, shard(front, net))
    plain, net = two_nets(fx, Layer)
    net[1] = shard(front, net[1])
    assert_trains(plain, shard(front, net))
