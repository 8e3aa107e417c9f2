"""Tied parameters: one storage, one gradient, whichever way the tied modules were wrapped."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import assert_same_grads, each_front, full_grads, full_state, local_numel, shard, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy


class Tied(nn.Module):
    """Embedding and head share a weight, as do two inner layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.first(self.embed(x)).tanh()
        return self.head(self.last(self.middle(x).tanh()))


HAND = {
    "nested and root": ["embed", "first"],
    "all": ["embed", "first", "middle", "last", "head"],
    "later first": ["head", "last"],
}


def _train(steps, *modules, seed=0):
    for model in modules:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            x = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed + step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def _assert_same(plain, model):
    state = full_state(model)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)
    assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)


@each_front
@ranks(2)
def test_training_tied_parameters(rank, world_size, front):
    for how in ["always", "linear", *HAND]:
        if how in HAND:
            torch.manual_seed(0)
            plain: nn.Module = Tied().double()
            model: nn.Module = copy.deepcopy(plain)
            for name in HAND[how]:
                setattr(model, name, shard(front, getattr(model, name)))
            model = shard(front, model)
        else:
            policy = always_wrap_policy if how == "always" else ModuleWrapPolicy({nn.Linear})
            plain, model = twins(front, Tied, torch.float64, auto_wrap_policy=policy)
        if how == "all":
            total = torch.tensor(sum(local_numel(param) for param in model.parameters()))
            torch.distributed.all_reduce(total)
            assert abs(total.item() - sum(param.numel() for param in plain.parameters())) <= 16, "alignment"
        _train(4, plain, model)
        _assert_same(plain, model)
        names = [name for name, _ in plain.named_parameters()]
        with FSDP.summon_full_params(model) if isinstance(model, FSDP) else nullcontext():
            assert [name for name, _ in model.named_parameters()] == names
            assert model.embed.weight is model.head.weight
            with torch.no_grad():
                model.head.weight.add_(1)
                plain.head.weight.add_(1)
        _train(2, plain, model, seed=9)
        _assert_same(plain, model)


orig_and_composable = pytest.mark.parametrize("front", ["orig", "composable"])


@orig_and_composable
@ranks(2)
def test_tied_modules_without_a_common_root(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(6, 6).double(), nn.Linear(6, 6).double()])
    plain[1].weight = plain[0].weight
    wrapped = [shard(front, module) for module in copy.deepcopy(plain)]
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        for first, second in (plain, wrapped):
            second(first(x).tanh()).square().sum().backward()
    grads = {**full_grads(wrapped[0]), "other": full_grads(wrapped[1])["bias"]}
    for name, param in (*plain[0].named_parameters(), ("other", plain[1].bias)):
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_what_is_tied_to_a_dtensor_is_refused(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    shard("composable", model[0])
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'1\.weight' is the sharded parameter of another unit: tie"):
        shard("composable", model)
