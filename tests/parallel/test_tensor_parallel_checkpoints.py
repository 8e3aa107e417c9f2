"""States of tensor-parallel models: to and from other meshes, torch's `fully_shard`, and plain modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import tp_nets
from bed import ranks
from bed.sampling import few_fast, part_of
from fronts import full
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, checkpoint, fully_shard
from fsdp_wrap import distributed_state_dict as our_functions
from fsdp_wrap.wrap import ModuleWrapPolicy

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


def wrapped(model: nn.Module, data: DeviceMesh, use_orig_params: bool) -> FSDP:
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}),
        device_mesh=data,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if data.ndim > 1 else None,
        use_orig_params=use_orig_params,
    )


class Side:
    """A model with its optimizer, and the functions that save and load them."""

    def __init__(self, name: str, seed: int, plan: str = "sequence") -> None:
        front, _, mesh_name = name.partition("-")
        self.model: nn.Module = tp_nets.net(seed=seed, hidden=12)  # a matrix product's must divide
        self.functions: Any = torch_functions if front in ("torch", "plain") else our_functions
        self.wraps = front in ("orig", "wrapped")
        self.copies, self._data = 1, None
        if front != "plain":
            _, self._data, tensor = tp_nets.mesh_of(mesh_name)
            tp_nets.parallelize(self.model, tensor, plan)
            if self.wraps:
                self.model = wrapped(self.model, self._data, front == "orig")
            else:
                shard = fully_shard if front == "ours" else torch_fully_shard
                tp_nets.shard_blocks(self.model, shard, mesh=self._data)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, seed: int) -> None:
        tokens = tp_nets.batches(1, seed)[0]  # all copies compute with the same
        tp_nets.loss_of(self.model, tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, whole: bool = False) -> dict[str, Any]:
        options = torch_functions.StateDictOptions(full_state_dict=whole)
        model, optim = self.functions.get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optim": optim}

    def take(self, state: dict[str, Any], whole: bool = False) -> None:
        options = torch_functions.StateDictOptions(full_state_dict=whole)
        self.functions.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )

    def values(self) -> dict[str, torch.Tensor]:
        """All values, whole."""
        found: dict[str, torch.Tensor] = {}
        if self.wraps:
            state = self.state(whole=True)
            for name, value in state["model"].items():
                found[name] = value
                entry = state["optim"]["state"].get(name, {})
                found.update({f"{name}.{key}": each for key, each in entry.items()})
            return found
        for name, param in self.model.named_parameters():
            found[name] = full(param.detach())
            for key, value in self.optimizer.state[param].items():
                found[f"{name}.{key}"] = full(value)
        return found


def hand_over(giver: Side, taker: Side, way: str, path: Path) -> None:
    if way == "full":
        taker.take(copy.deepcopy(giver.state(whole=True)), whole=True)
    elif way == "dcp":
        dcp.save(giver.state(), checkpoint_id=path)
        state = taker.state()
        dcp.load(state, checkpoint_id=path)
        taker.take(state)
    else:
        checkpoint.save(path, giver.model, giver.optimizer)
        checkpoint.load(path, taker.model, taker.optimizer)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], exact: bool = True) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(value, other[name], msg=name, **tolerance)


@ranks(4)
@pytest.mark.parametrize("exchange", few_fast(part_of(EXCHANGES, 2), 8), ids="-to-".join)
def test_states_go_from_mesh_to_mesh(rank, world_size, tmp_path, exchange):
    giver, taker, way = exchange
    one, other = Side(giver, seed=0), Side(taker, seed=1)
    one.step(0)
    other.step(1)
    hand_over(one, other, way, tmp_path / "step")
    assert_same(other.values(), one.values())
    one.step(2)
    other.step(2)
    assert_same(other.values(), one.values(), exact=False)


@ranks(4)
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", ["flat", "wide", "replicas", "shards"])
@pytest.mark.parametrize("plan", tp_nets.PLANS)
def test_state_dicts_are_those_of_upstream(rank, world_size, mesh, plan):
    ours, theirs = Side(f"ours-{mesh}", 0, plan), Side(f"torch-{mesh}", 0, plan)
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
    loaded = ours.model.load_state_dict(Side(f"torch-{mesh}", 1, plan).model.state_dict())
    assert not loaded.missing_keys
    theirs = Side(f"torch-{mesh}", 1, plan)
    for (name, param), other in zip(ours.model.named_parameters(), theirs.model.parameters()):
        assert torch.equal(param.to_local(), other.to_local()), name
    assert all(torch.isfinite(each).all() for each in ours.state(whole=True)["model"].values())
