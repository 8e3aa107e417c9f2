"""CPU offload: shards and gradients in host memory, also on a host without accelerators."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fronts import clip, full_state, no_sync, shard
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, loss_of, tokens
from scenario import pairwise

SPACE: dict[str, list[Any]] = {
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "front": ["flat", "orig"],
    "per_block": [False, True],
    "accumulation": ["F", "FF", "TF"],
    "max_norm": [None, 0.01],
    "optimizer": ["AdamW", "SGD"],
    "mixed_precision": [False, True],
}
COMPOSABLE_SPACE = {
    **SPACE,
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP"],
    "front": ["composable"],
    "optimizer": ["SGD"],
    "mixed_precision": [False],
}


@pytest.mark.parametrize("space", [SPACE, COMPOSABLE_SPACE], ids=["wrapper", "fully_shard"])
@ranks(1, 2)
def test_training_equals_ddp(rank, world_size, space):
    for scenario in pairwise(space, seed=1):
        _check_training(rank, scenario)


def _check_training(rank: int, scenario: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Transformer(blocks=2).double()
    ddp = DDP(copy.deepcopy(net))
    options = {"mixed_precision": MixedPrecision(torch.float64)} if scenario["mixed_precision"] else {}
    model = shard(
        scenario["front"],
        net,
        ModuleWrapPolicy({Block}) if scenario["per_block"] else None,
        sharding_strategy=ShardingStrategy[scenario["strategy"]],
        cpu_offload=CPUOffload(offload_params=True),
        **options,
    )
    make = getattr(torch.optim, scenario["optimizer"])
    optimizers = [make(each.parameters(), lr=1e-2) for each in (ddp, model)]
    for step in range(3):
        for part, unsynced in enumerate(scenario["accumulation"]):
            losses = []
            for each in (ddp, model):
                with no_sync(each) if unsynced == "T" else nullcontext():
                    loss = loss_of(each, tokens(rank, 10 * step + part))
                    loss.backward()
                losses.append(loss.detach())
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0, msg=f"loss: {scenario}")
        assert all(param.grad is None or param.grad.device.type == "cpu" for param in model.parameters())
        if scenario["max_norm"] is not None:
            expected = nn.utils.clip_grad_norm_(ddp.parameters(), scenario["max_norm"])
            norm = clip(model, scenario["max_norm"])
            torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected_state = ddp.module.state_dict()
    for name, value in full_state(model).items():
        if "in_proj_bias" in name and scenario["optimizer"] == "AdamW":
            continue  # its key part has a true gradient of zero, which AdamW blows up
        torch.testing.assert_close(
            value, expected_state[name], rtol=1e-9, atol=1e-11, msg=f"{name}: {scenario}"
        )
