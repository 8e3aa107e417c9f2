"""`torch.autograd.grad` with respect to a layer's parameter: of the tensor that the forward computed with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import FULL, KEPT, each_front, full_grads, inner, shard
from fsdp_wrap import fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Around, Middle


def layer_of(model: Any, part: str) -> nn.Linear:
    net = inner(model)
    return net.last if part == "root" else inner(net.middle).linear


def twins(front: str, **options: Any) -> tuple[Around, nn.Module]:
    torch.manual_seed(0)
    plain = Around().double()
    return plain, shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Middle}), **options)


def losses(plain: nn.Module, model: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.randn(3, WIDTH, dtype=torch.float64) + rank
    return plain(batch).square().sum(), model(batch).square().sum()


def assert_backward_still_right(
    plain: nn.Module, model: nn.Module, expected: torch.Tensor, loss: torch.Tensor, world_size: int
) -> None:
    expected.backward()
    loss.backward()
    found = full_grads(model)
    for name, param in plain.named_parameters():
        torch.distributed.all_reduce(param.grad)
        torch.testing.assert_close(found[name], param.grad / world_size)


@pytest.mark.parametrize("strategy", [FULL, KEPT], ids=["resharded", "kept"])
@pytest.mark.parametrize("part", ["root", "nested"])
@each_front
@ranks(2)
def test_of_a_parameter_taken_in_the_forward(rank, world_size, front, part, strategy):
    plain, model = twins(front, sharding_strategy=strategy)
    taken: list[nn.Parameter] = []
    layer = layer_of(model, part)
    handle = layer.register_forward_pre_hook(lambda module, _: taken.append(module.weight))
    expected, loss = losses(plain, model, rank)
    handle.remove()
    (wanted,) = torch.autograd.grad(expected, layer_of(plain, part).weight, retain_graph=True)
    (found,) = torch.autograd.grad(loss, taken, retain_graph=True)
    torch.testing.assert_close(found, wanted)  # this rank's own, reduced by no one
    assert_backward_still_right(plain, model, expected, loss, world_size)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("part", ["root", "nested"])
@ranks(2)
def test_of_a_parameter_shown_by_unshard(rank, world_size, part, reshard):
    torch.manual_seed(0)
    plain = Around().double()
    model = copy.deepcopy(plain)
    fully_shard(model.middle, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    expected, loss = losses(plain, model, rank)
    (wanted,) = torch.autograd.grad(expected, layer_of(plain, part).weight, retain_graph=True)
    unit = model if part == "root" else model.middle
    unit.unshard()
    (found,) = torch.autograd.grad(loss, layer_of(model, part).weight, retain_graph=True)
    unit.reshard()
    torch.testing.assert_close(found, wanted)
    assert_backward_still_right(plain, model, expected, loss, world_size)


@pytest.mark.parametrize(("part", "strategy"), [("root", FULL), ("root", KEPT), ("nested", KEPT)])
@each_front
@ranks(2)
def test_of_a_parameter_that_the_forward_kept(rank, world_size, front, part, strategy):
    # The wrapper's root is kept whatever the strategy, and so is that of fully_shard by default.
    options = {} if (front, strategy) == ("composable", FULL) else {"sharding_strategy": strategy}
    plain, model = twins(front, **options)
    for _ in range(2):
        expected, loss = losses(plain, model, rank)
        wanted = torch.autograd.grad(expected, layer_of(plain, part).weight, retain_graph=True)
        found = torch.autograd.grad(loss, layer_of(model, part).weight, retain_graph=True)
        torch.testing.assert_close(found, wanted)  # this rank's own, reduced by no one
        assert_backward_still_right(plain, model, expected, loss, world_size)
        plain.zero_grad()
        model.zero_grad()


@each_front
@ranks(2)
def test_of_a_sharded_parameter_autograd_itself_refuses(rank, world_size, front):
    plain, model = twins(front)
    expected, loss = losses(plain, model, rank)
    with pytest.raises(RuntimeError, match="not have been used in the graph|does not require grad"):
        torch.autograd.grad(loss, layer_of(model, "nested").weight)
    assert_backward_still_right(plain, model, expected, loss, world_size)
