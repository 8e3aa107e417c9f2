"""Training with state over replicas has the bits of plain hybrid sharding, whatever else it is used with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from fronts import each_front, full_state
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from models import WRAPPINGS, Transformer, loss_of, tokens

NAMES = ("replicate", "shard")


def hybrid(
    front: str, model: nn.Module, over: bool, shape: tuple[int, int] = (2, 2), **options: Any
) -> nn.Module:
    """Shards in copies; `over` lets all ranks hold one state."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    if front == "composable":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, state_over_replicas=over, **options)
        return fully_shard(model, mesh=mesh, state_over_replicas=over, **options)
    return FSDP(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=front == "orig",
        state_over_replicas=over,
        **options,
    )


def twins(front: str, **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    model = Transformer()
    return [hybrid(front, copy.deepcopy(model), over, **options) for over in (False, True)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_front
@pytest.mark.parametrize("shared_memory", [False, True])
@ranks(4)
def test_bits_are_those_of_hybrid_sharding(rank, world_size, front, shared_memory):
    results = []
    for model in twins(front, shared_memory=shared_memory):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        results.append((train(model, optimizer, rank, range(3)), full_state(model)))
    assert results[0][0] == results[1][0]
    assert results[0][1].keys() == results[1][1].keys()
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
