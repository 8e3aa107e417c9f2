"""Summoning, upcasts, copies and forward methods in mixed precision: users get the master dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, ShardingStrategy, register_fsdp_forward_method
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 6
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"code": self.up(x)}

    def forward(self, x):
        return x + self.down(torch.tanh(self.encode(x)["code"]))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Block(), nn.Linear(WIDTH, 3))


def wrap(net: nn.Module, **options: Any) -> FSDP:
    return FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), **{"mixed_precision": LOW, **options})


def train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()


def assert_same(first: nn.Module, second: nn.Module, dtype: torch.dtype) -> None:
    one, other = first.state_dict(), second.state_dict()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.dtype == other[name].dtype
        assert value.dtype == dtype or "num_batches" in name


@each_form
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_upcast_changes_the_master_dtype_alone(rank, world_size, use_orig_params, strategy):
    """As accelerate does with a model that was loaded in low precision."""
    options = {"use_orig_params": use_orig_params, "sharding_strategy": ShardingStrategy[strategy]}
    low = make_net().bfloat16()
    expected = wrap(copy.deepcopy(low).float(), **options)
    model = wrap(low, **options)
    for module in FSDP.fsdp_modules(model):
        for segment in module._unit.handle.segments:
            segment.layout.flat_param.data = segment.layout.flat_param.data.float()
        module._handle._orig_param_dtype = torch.float32
    model.module[1].float()  # its buffers
    for net in (model, expected):
        train(net, rank)
    assert_same(model, expected, torch.float32)
    leaves = [
        leaf for unit in FSDP.fsdp_modules(model) for seg in unit._unit.handle.segments for leaf in seg.leaves
    ]
    assert torch.bfloat16 in {leaf.dtype for leaf in leaves}


@each_form
@pytest.mark.parametrize("keep", [False, True], ids=["master", "low"])
@pytest.mark.parametrize("rank0_only", [False, True], ids=["all_ranks", "first_rank"])
@ranks(2)
def test_summoned_gradients(rank, world_size, use_orig_params, rank0_only, keep):
    policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=keep)
    model = wrap(make_net(), use_orig_params=use_orig_params, mixed_precision=policy)
    model(torch.arange(4.0 * WIDTH).view(4, WIDTH)).float().square().sum().backward()
    before = [
        (param.grad, None if param.grad is None else param.grad.clone()) for param in model.parameters()
    ]
    for factor in (1, 2):
        with FSDP.summon_full_params(model, with_grads=True, rank0_only=rank0_only):
            for param in model.parameters() if rank == 0 or not rank0_only else ():
                assert param.dtype == param.grad.dtype == torch.float32
                if factor != 1:
                    param.grad.mul_(factor)
        for (grad, values), param in zip(before, model.parameters()):
            assert param.grad is grad
            assert grad is None or torch.equal(grad, values * factor)  # type: ignore[arg-type]


@each_form
@ranks(2)
def test_copies_and_conversions(rank, world_size, use_orig_params):
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = wrap(make_net(), use_orig_params=use_orig_params, mixed_precision=policy)
    train(model, rank)
    second = copy.deepcopy(model)
    for net in (model, second):
        train(net, rank)
    assert repr(second) == repr(model)
    assert_same(second, model, torch.float32)


@each_form
@ranks(2)
def test_forward_methods_compute_in_low_precision(rank, world_size, use_orig_params):
    model = wrap(make_net(), use_orig_params=use_orig_params)
    register_fsdp_forward_method(model[2], "encode")
    x = torch.randn(4, WIDTH)
    code = model[2].encode(x.bfloat16())["code"]
    assert code.dtype == torch.bfloat16
    code.float().sum().backward()
    grads = [param.grad for param in model[2].parameters() if param.grad is not None]
    assert {grad.dtype for grad in grads} == ({torch.float32} if grads else set())
    assert grads or rank == 1  # which may hold no element of what was used
