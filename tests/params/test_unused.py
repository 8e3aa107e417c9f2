"""Parameters that some ranks use and others do not: all ranks decide alike whether there is a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fronts import each_front, full_state, shard, twins
from fsdp_wrap import MixedPrecision, ShardingStrategy
from fsdp_wrap.comm_hooks import DefaultState, LowPrecisionState, fp16_compress_hook, reduce_scatter_hook
from partly_used import Partly, Wide, assert_small_gradients_count


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def assert_trained(front: str, model: nn.Module, plain: Any, size: int, tolerance: float = 1e-6) -> None:
    """Two steps have made of the model what they make of a plain one that sees the batches of all ranks."""
    before, found, optimizer = plain.none.detach().clone(), full_state(model), adamw(plain)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(plain(each) for each in range(size)) / size).backward()
        optimizer.step()
    for name in ("all", "one", "zero", "last"):
        expected = plain.get_parameter(name).detach()
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)
    if front != "flat":  # whose unused parameters get gradients of zeros
        assert torch.equal(found["none"], before)


def check(front: str, rank: int, size: int, tolerance: float = 1e-6, **options: Any) -> None:
    plain, model = twins(front, Partly, **options)
    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(rank).backward()
        optimizer.step()
    assert_trained(front, model, plain, size, tolerance)


@each_front
@ranks(2, 3)
def test_ranks_step_alike(rank, world_size, front, monkeypatch):
    check(front, rank, world_size)
    if front == "composable":
        return
    for dtype in (torch.float16, torch.bfloat16):
        check(front, rank, world_size, 1e-2, mixed_precision=MixedPrecision(reduce_dtype=dtype))
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", "0")  # gloo keeps the sign of zeros
    for way in ("plain", "exchange"):
        monkeypatch.setenv("FSDP_WRAP_GLOO", way)
        check(front, rank, world_size)


@ranks(4)
def test_replicas_step_alike(rank, world_size):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    for front in ("flat", "orig"):
        check(front, rank, world_size, sharding_strategy=ShardingStrategy.NO_SHARD)
        hybrid = ShardingStrategy.HYBRID_SHARD
        check(front, rank, world_size, sharding_strategy=hybrid, device_mesh=mesh)


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_reductions_that_round(rank, world_size, front):
    for state, hook in ((DefaultState, reduce_scatter_hook), (LowPrecisionState, fp16_compress_hook)):
        _, model = twins(front, lambda: Wide(Partly()))
        model.register_comm_hook(state(dist.group.WORLD), hook)
        assert_small_gradients_count(front, model, rank)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.one = nn.Parameter(torch.randn(9, 5))
        self.other = nn.Parameter(torch.randn(9, 5))

    def forward(self, use: bool) -> torch.Tensor:
        return self.all.sum() + (self.one[0].double().sum() if use else 0)


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_what_no_rank_uses_has_no_gradient_on_any(rank, world_size, front):
    """A flat parameter of which one rank uses a part has one on all ranks."""
    model = shard(front, Mixed())
    for user in (0, 1, None):
        model.zero_grad()
        model(rank == user).backward()
        found = {name.removeprefix("_fsdp_wrapped_module."): p for name, p in model.named_parameters()}
        for name, param in found.items():
            doubtful = {"other": False, "one": user is not None, "_flat_param_1": user is not None}
            used = doubtful.get(name, True) and param.numel() > 0
            assert (param.grad is not None) == used, (name, user)
