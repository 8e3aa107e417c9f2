"""States of tensor-parallel models: to and from other meshes, torch's `fully_shard`, and plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._composable import replicate_with_fsdp as torchs
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import tp_nets
from bed import ranks
from bed.sampling import few_fast, part_of
from beside import assert_same_gradients
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard, replicate
from fsdp_wrap import distributed_state_dict as our_functions
from fsdp_wrap.wrap import ModuleWrapPolicy
from mesh_nets import Side, assert_same_sides

SIDES = [
    *("ours-flat", "ours-long", "ours-wide", "ours-replicas"),
    *("orig-flat", "orig-shards", "wrapped-long", "wrapped-replicas"),
    *("torch-flat", "torch-shards", "plain"),
]
"""A front-end ("orig" and "wrapped" are the wrapper's two forms), and the mesh."""

EXCHANGES = [
    (giver, taker, ["full", "dcp", "folder"][(place + number) % 3])
    for number, giver in enumerate(SIDES)
    for place, taker in enumerate(SIDES)
    if not {giver.partition("-")[0], taker.partition("-")[0]} <= {"torch", "plain"}
]
"""Who gives, who takes, and by which way."""


FUNCTIONS: dict[str, Any] = {
    "ours": fully_shard,
    "torch": torch_fully_shard,
    "our copies": replicate,
    "torch copies": torchs.replicate,
}


def side(name: str, seed: int, plan: str = "sequence") -> Side:
    front, _, mesh_name = name.partition("-")
    model = tp_nets.net(seed=seed, hidden=12)  # a matrix product's must divide
    if front == "plain":
        return Side(model, torch_functions)
    _, data, tensor = tp_nets.mesh_of(mesh_name)
    tp_nets.parallelize(model, tensor, plan)
    if front in FUNCTIONS:
        tp_nets.shard_blocks(model, FUNCTIONS[front], mesh=data)
        return Side(model, torch_functions if "torch" in front else our_functions)
    wrapped = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}),
        device_mesh=data,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if data.ndim > 1 else None,
        use_orig_params=front == "orig",
    )
    return Side(wrapped)


def step(each: Side, seed: int) -> None:
    """All copies compute with the same."""
    tp_nets.loss_of(each.model, tp_nets.batches(1, seed)[0])
    each.optimizer.step()
    each.optimizer.zero_grad()


@ranks(4)
@pytest.mark.parametrize("exchange", few_fast(part_of(EXCHANGES, 2), 8), ids="-to-".join)
def test_states_go_from_mesh_to_mesh(rank, world_size, tmp_path, exchange):
    giver, taker, way = exchange
    one, other = side(giver, seed=0), side(taker, seed=1)
    step(one, 0)
    step(other, 1)
    one.give(other, way, tmp_path / "step")
    assert_same_sides(other, one)
    step(one, 2)
    step(other, 2)
    assert_same_sides(other, one, 1e-12)


@ranks(4)
@pytest.mark.parametrize(
    ("kind", "mesh", "plan"),
    [
        ("", "flat", "columns"),
        ("", "replicas", "sequence"),
        ("", "wide", "loss"),
        (" copies", "flat", "sequence"),
    ],
)
def test_state_dicts_are_those_of_upstream(rank, world_size, kind, mesh, plan):
    ours = side(f"our{kind or 's'}-{mesh}", 0, plan)
    theirs, others = (side(f"torch{kind}-{mesh}", seed, plan) for seed in range(2))
    for found, expected in (
        (ours.model.state_dict(), theirs.model.state_dict()),
        (ours.state()["model"], theirs.state()["model"]),
    ):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert type(found[name]) is type(value) is DTensor
            assert found[name].placements == value.placements, name
            assert found[name].device_mesh == value.device_mesh, name
            assert torch.equal(found[name].to_local(), value.to_local()), name
    loaded = ours.model.load_state_dict(others.model.state_dict())
    assert not loaded.missing_keys
    for (name, param), other in zip(ours.model.named_parameters(), others.model.parameters()):
        assert torch.equal(param.to_local(), other.to_local()), name
    for each in (ours, others):
        tp_nets.loss_of(each.model, tp_nets.batches(1, 0)[0], plan)
    assert_same_gradients(ours.model, others.model)
    assert all(torch.isfinite(each).all() for each in ours.state(full_state_dict=True)["model"].values())
