"""Every sharding strategy gives the numbers of DDP and keeps in memory what it promises."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from fronts import assert_same_grads, assert_same_values
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import CustomPolicy
from models import (
    WRAPPINGS,
    Block,
    Transformer,
    gather_objects,
    loss_of,
    tokens,
    train,
    transformer_twins,
    twins,
)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_with_accumulation(module, optimizer, rank):
    with module.no_sync():
        loss_of(module, tokens(rank, 9)).backward()
    loss_of(module, tokens(rank, 8)).backward()
    optimizer.step()
    train(module, optimizer, rank, range(4))


@pytest.mark.parametrize(("use_orig_params", "wrapping"), [(False, "whole"), (True, "block")])
@ranks(1, 2)
def test_no_shard_is_bit_equal_to_ddp(rank, world_size, use_orig_params, wrapping):
    plain, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS[wrapping](),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    ddp = DDP(plain)
    for module in (ddp, model):
        train_with_accumulation(module, _adamw(module), rank)
    assert_same_values(model, ddp)
    assert_same_grads(model, ddp)


@ranks(2)
def test_no_shard_keeps_one_copy_and_shapes(rank, world_size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    shapes = [param.shape for param in module.parameters()]
    size = sum(param.numel() * 4 for param in module.parameters())
    model = FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    assert [param.shape for param in model.parameters()] == shapes
    with count_collectives() as traffic:
        model(torch.ones(1, 256)).sum().backward()
    assert {name: calls for name, (calls, _) in traffic.items()} == {"all_reduce": 1}
    assert [param.grad.shape for param in model.parameters()] == shapes
    assert live_bytes() <= 2 * size + 64 * 1024  # parameters and gradients


def _hybrid_arguments(form: str):
    if form == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    if form == "local_world_size":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return {}
    groups = {name: dist.new_group(members) for name, members in _HYBRID_GROUPS.items()}
    rank = dist.get_rank()
    return {"process_group": (groups[f"shard{rank // 2}"], groups[f"replicate{rank % 2}"])}


_HYBRID_GROUPS = {"shard0": [0, 1], "shard1": [2, 3], "replicate0": [0, 2], "replicate1": [1, 3]}


@pytest.mark.parametrize(
    ("use_orig_params", "strategy", "form"),
    [
        (False, "HYBRID_SHARD", "mesh"),
        (True, "_HYBRID_SHARD_ZERO2", "mesh"),
        (True, "HYBRID_SHARD", "pair"),
        (False, "_HYBRID_SHARD_ZERO2", "local_world_size"),
    ],
)
@ranks(4)
def test_hybrid_equals_ddp(rank, world_size, use_orig_params, strategy, form):
    plain, model = transformer_twins(use_orig_params, strategy, **_hybrid_arguments(form))
    ddp = DDP(plain)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (ddp, model)]
    for module, optimizer in zip((ddp, model), optimizers):
        train_with_accumulation(module, optimizer, rank)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), norm, rtol=1e-10, atol=1e-12)
    assert_same_values(model, ddp, rtol=0, atol=1e-10)
    assert_same_grads(model, ddp, rtol=0, atol=1e-10)
    local = sum(param.numel() for param in model.parameters())
    full = sum(param.numel() for param in plain.parameters())
    assert abs(local - full / 2) <= 200  # one half each, but for alignment


@ranks(4)
def test_hybrid_syncs_module_states_from_rank_0(rank, world_size):
    torch.manual_seed(rank)
    module = nn.Linear(5, 7)
    expected = gather_objects(module.state_dict())[0]
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **_hybrid_arguments("mesh")}
    for name, value in FSDP(module, sync_module_states=True, **options).state_dict().items():
        assert torch.equal(value, expected[name])


@ranks(2)
def test_strategies_differ_per_unit(rank, world_size):
    chosen = iter(["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"])

    def choose(module):
        return isinstance(module, Block) and {"sharding_strategy": ShardingStrategy[next(chosen)]}

    plain, model = twins(Transformer, auto_wrap_policy=CustomPolicy(choose), use_orig_params=True)
    ddp = DDP(plain)
    for module in (ddp, model):
        train(module, _adamw(module), rank, range(4))
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), norm)
    assert_same_values(model, ddp)


@ranks(2)
def test_hosts_must_hold_equally_many_ranks(rank, world_size):
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=3 does not divide the 2 ranks"):
        FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
