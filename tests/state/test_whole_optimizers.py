"""Optimizers that are not elementwise: refused where they would see pieces, else as on a plain model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fronts
from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy


class Lamb(torch.optim.Optimizer):
    """An optimizer of a user, that scales the update of a parameter by two norms."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.lerp_(param.grad, 0.1)
                    param.sub_(moment, alpha=group["lr"] * float(param.norm() / (moment.norm() + 1e-8)))


WHOLE = {"LBFGS": torch.optim.LBFGS, "Adafactor": torch.optim.Adafactor, "Lamb": Lamb}


class Own(torch.optim.Adafactor):
    """A subclass, as users write them."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def step(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        total = sum(model(each).pow(2).mean() for each in batches) / len(batches)
        total.backward()
        return float(total)

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "copied", "use_orig_params"),
    [("LBFGS", False, True), ("Adafactor", True, False), ("Lamb", True, True), ("Own", False, False)],
)
@ranks(2)
def test_pieces_are_refused(rank, world_size, use_orig_params, copied, kind):
    model = FSDP(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
    model = copy.deepcopy(model) if copied else model
    optimizer = {**WHOLE, "Own": Own}[kind](model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(batch(rank)).sum().backward()
    told = rf"{kind} computes with whole parameters, and of '0\.weight'.*rank {rank}"
    with pytest.raises(RuntimeError, match=told):
        step(model, optimizer, [batch(rank)])
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    generator = torch.get_rng_state()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch(rank)])
    assert torch.equal(torch.get_rng_state(), generator)


@fronts.each_form
@pytest.mark.parametrize("kind", WHOLE)
@ranks(1, 2)
def test_whole_parameters_train_as_a_plain_model(rank, world_size, use_orig_params, kind):
    for strategy in ("FULL_SHARD", "NO_SHARD") if world_size == 1 else ("NO_SHARD",):
        plain = net()
        options: Any = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
        model = FSDP(copy.deepcopy(plain), **options)
        ours, theirs = (WHOLE[kind](each.parameters(), lr=0.1) for each in (model, plain))
        wants_shapes, wants_each = kind == "Adafactor" and strategy == "FULL_SHARD", kind != "LBFGS"
        if wants_shapes or (wants_each and not use_orig_params):  # all there, but flat, or as one
            with pytest.raises(RuntimeError, match=f"{kind} computes with whole parameters"):
                step(model, ours, [batch(0)])
            continue
        for _ in range(2):
            step(model, ours, [batch(0)])
            step(plain, theirs, [batch(0)])
        fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    params = [*module.parameters()]
    matrices, others = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


@fronts.each_front
@ranks(2)
def test_weight_decay_that_groups_lose_is_told(rank, world_size, front):
    """If they are made after wrapping. The cure that is told works."""
    module = net()
    before, plain = groups_of(module), copy.deepcopy(module)
    model = fronts.shard(front, module, ModuleWrapPolicy({nn.Linear}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(groups_of(model))
        for _ in range(2):
            model(batch(rank)).sum().backward()
            optimizer.step()
    told = [str(each.message) for each in caught if "weight decay may be lost" in str(each.message)]
    assert len(told) == (0 if front == "composable" else 1)
    assert all("this AdamW has '0.weight' in a group without it" in each for each in told)
    if front == "orig":
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "weight decay")
            model.load_state_dict(plain.state_dict())
            step(model, torch.optim.SGD(before, lr=0.1), [batch(0)])
        step(plain, torch.optim.SGD(groups_of(plain), lr=0.1), [batch(0)])
        fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)
