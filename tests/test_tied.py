"""Tied parameters: one storage, one gradient, whichever way the tied modules were wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy, always_wrap_policy
from models import full_grads, twins

each_form = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


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


def _wrap_by_hand(model: nn.Module, names: list[str], **kwargs) -> FSDP:
    for name in names:
        setattr(model, name, FSDP(getattr(model, name), **kwargs))
    return FSDP(model, **kwargs)


HAND = {
    "siblings": ["first", "last"],
    "nested and root": ["embed", "first"],
    "all": ["embed", "first", "middle", "last", "head"],
    "later first": ["head", "last"],
}


def _train(model, steps, seed=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _assert_same(plain, model):
    state, grads = model.state_dict(), full_grads(model)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("how", ["always", "linear", *HAND])
@each_form
@ranks(2)
def test_training_tied_parameters(rank, world_size, use_orig_params, how):
    if how in HAND:
        plain, _ = twins(Tied, torch.float64)
        torch.manual_seed(0)
        model = _wrap_by_hand(Tied().double(), HAND[how], use_orig_params=use_orig_params)
        model.load_state_dict(plain.state_dict())
    else:
        policy = always_wrap_policy if how == "always" else ModuleWrapPolicy({nn.Linear})
        plain, model = twins(Tied, torch.float64, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for module in (plain, model):
        _train(module, 4)
    _assert_same(plain, model)
    names = [name for name, _ in plain.named_parameters()]
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == names
        assert model.embed.weight is model.head.weight
        with torch.no_grad():
            model.head.weight.add_(1)
            plain.head.weight.add_(1)
    for module in (plain, model):
        _train(module, 2, seed=9)
    _assert_same(plain, model)


@each_form
@ranks(2)
def test_a_tied_parameter_counts_once(rank, world_size, use_orig_params):
    plain, _ = twins(Tied)
    model = _wrap_by_hand(Tied(), HAND["all"], use_orig_params=use_orig_params)
    total = torch.tensor(sum(param.numel() for param in model.parameters()))
    torch.distributed.all_reduce(total)
    assert abs(total.item() - sum(param.numel() for param in plain.parameters())) <= 16  # alignment


@each_form
@ranks(2)
def test_tied_modules_without_a_common_root(rank, world_size, use_orig_params):
    """Two wrapped modules that share a weight, each a root of its own."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(6, 6).double(), nn.Linear(6, 6).double()])
    plain[1].weight = plain[0].weight
    torch.manual_seed(0)
    raw = nn.ModuleList([nn.Linear(6, 6).double(), nn.Linear(6, 6).double()])
    raw[1].weight = raw[0].weight
    wrapped = [FSDP(module, use_orig_params=use_orig_params) for module in raw]
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        for first, second in (plain, wrapped):
            second(first(x).tanh()).square().sum().backward()
    grads = full_grads(wrapped[0])
    for name, param in plain[0].named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(full_grads(wrapped[1])["bias"], plain[1].bias.grad, rtol=1e-12, atol=1e-12)
