"""Training with one state for all copies has the bits of plain hybrid sharding."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from copies import adamw, both, in_copies, step, transformer
from fronts import FRONTS, assert_tensors, each_front, full_grads, full_state, no_sync, shard
from fsdp_wrap import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, gather_objects, loss_of, tokens

BF16 = torch.bfloat16
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (
        {"mixed_precision": MixedPrecision(BF16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)},
    ),
    "offload": ({"cpu_offload": CPUOffload(True)}, {"offload_policy": CPUOffloadPolicy()}),
    "kept": ({"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2}, {"reshard_after_forward": False}),
    "aligned": ({"shard_alignment": "rows"}, {"shard_alignment": "rows"}),
}
"""Of the wrapper, and of `fully_shard`."""


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    expected, state = full_state(one), full_state(other)
    assert expected.keys() == state.keys()
    assert_tensors(state, expected)


@each_front
@pytest.mark.parametrize("shared_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
@ranks(4)
def test_bits_are_those_of_hybrid_sharding(rank, world_size, front, shared_memory):
    """Also with accumulated gradients, parameters that freeze in between, and an evaluation before a step."""
    models = both(front, shared_memory=shared_memory)
    optimizers = [adamw(model) for model in models]
    for number in range(3):
        losses = []
        for model, optimizer in zip(models, optimizers):
            for name, param in model.named_parameters():
                if "blocks.1" in name:
                    param.requires_grad_(number != 1)
            with torch.no_grad():
                losses.append(loss_of(model, tokens(rank, 7)).item())
            with no_sync(model) if number == 2 else nullcontext():
                loss_of(model, tokens(rank, 5)).backward()
            losses.append(loss_of(model, tokens(rank, number)).item())
            loss_of(model, tokens(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    assert_same_bits(*models)


@pytest.mark.parametrize(
    ("option", "front"),
    [
        pytest.param(option, front, marks=() if turn == number % 3 else pytest.mark.slow)
        for number, option in enumerate(OPTIONS)
        for turn, front in enumerate(FRONTS)
    ],
)
@ranks(4)
def test_bits_are_those_of_hybrid_sharding_with(rank, world_size, option, front):
    models = both(front, **OPTIONS[option][front == "composable"])
    for model in models:
        optimizer = adamw(model, foreach=True)
        for number in range(3):
            step(model, optimizer, number)
    assert_same_bits(*models)
    assert ("state over replicas" in repr(models[1])) and "state over replicas" not in repr(models[0])


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
@each_front
@ranks(4)
@pytest.mark.slow
def test_any_mesh_trains_as_full_sharding_does(rank, world_size, front, shape):
    """Also without names of its dimensions, and with clipped gradients; in float64."""
    plain = transformer(torch.float64)
    full = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Block}))
    names = None if shape == (2, 2) else ("replicate", "shard")
    model = in_copies(front, plain, shape=shape, names=names)
    norms = []
    for net in (full, model):
        optimizer = adamw(net, fused=True)
        for number in range(3):
            loss_of(net, tokens(rank, number)).backward()
            norms.append(clip_grad_norm_(net, 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norms[3:], norms[:3], rtol=1e-12, atol=0)
    assert_tensors(full_state(full), full_state(model), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("given", ["pair", "pair of a part"])
@ranks(4)
def test_pairs_of_groups_are_joined(rank, world_size, given):
    """A part of the ranks, here two copies on one rank each, gets a group that only those make."""
    size = 2 if given == "pair" else 1
    copies, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    if size == 1:
        copies, across = [[0], [1], [2], [3]], [[0, 1], [2, 3]]
    pair: Any = [dist.new_subgroups_by_enumeration(members)[0] for members in (copies, across)]
    model = FSDP(
        transformer(),
        process_group=pair,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        state_over_replicas=True,
    )
    assert model.world_size == 2 * size
    loss_of(model, tokens(rank, 0)).backward()
    plain = transformer()
    among = range(4) if size == 2 else range(rank // 2 * 2, rank // 2 * 2 + 2)
    for member in among:
        (loss_of(plain, tokens(member, 0)) / len(among)).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad, expected[name])
    assert gather_objects(rank) == [0, 1, 2, 3]
