"""State of all copies: saved and loaded in other layouts, edited, copied, and beside tensor parallelism."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mesh_nets
import tp_nets
from bed import ranks, run_ranks
from copies import adamw, in_copies, step, transformer
from fronts import FRONTS, each_front, full, full_state
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from mesh_nets import Side
from models import loss_of, tokens


def side(front: str, kind: str, seed: int) -> Side:
    """Returns a trained model on 4 ranks: "full", "hybrid" or with "one" state, and its optimizer."""
    model: Any = mesh_nets.net(seed)
    names = ("dp",) if kind == "full" else ("replicate", "dp")
    mesh = init_device_mesh("cpu", (4,) if kind == "full" else (2, 2), mesh_dim_names=names)
    over: dict[str, Any] = {"state_over_replicas": kind == "one"}
    if front == "composable":
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh, **over)
        fully_shard(model, mesh=mesh, **over)
    else:
        strategy = ShardingStrategy.FULL_SHARD if kind == "full" else ShardingStrategy.HYBRID_SHARD
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}),
            device_mesh=mesh,
            sharding_strategy=strategy,
            use_orig_params=front == "orig",
            **over,
        )
    made = Side(model)
    mesh_nets.train(made.model, made.optimizer, seed)
    return made


@pytest.mark.parametrize("way", ["full", "dcp", "folder"])
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.slow
def test_other_layouts_load_what_is_saved(front, way, tmp_path):
    """Model and optimizer to the bit, both ways, with copies alone and full sharding; training goes on."""
    run_ranks(4, saves_and_loads, front, way, tmp_path)


def saves_and_loads(rank: int, world_size: int, front: str, way: str, path: Path) -> None:
    for number, other in enumerate(("hybrid", "full")):
        for giver, taker in (("one", other), (other, "one")):
            first, second = side(front, giver, 1), side(front, taker, 2)
            first.give(second, way, path / f"{number}-{giver}")
            assert full_values(first) == full_values(second)
            for trained in (first, second):
                mesh_nets.train(trained.model, trained.optimizer, 3)
            values, expected = full_values(second), full_values(first)
            for name, value in expected.items():
                torch.testing.assert_close(values[name].tensor, value.tensor, rtol=1e-5, atol=1e-6, msg=name)


class Bits:
    """A tensor that equals another of the same bits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: Any) -> bool:
        return torch.equal(self.tensor, other.tensor)


def full_values(one: Side) -> dict[str, Bits]:
    state = one.state(flatten_optimizer_state_dict=True, full_state_dict=True)
    tensors = {**state["model"], **state["optim"]}
    return {name: Bits(full(value)) for name, value in tensors.items() if isinstance(value, torch.Tensor)}


@each_front
@ranks(4)
def test_what_is_loaded_or_edited_is_computed_with(rank, world_size, front):
    """Also what `summon_full_params` writes back, a copy of the model, and the copy after that."""
    model = in_copies(front, transformer())
    loss_of(model, tokens(rank, 0)).backward()
    state = {name: value * 0.5 for name, value in full_state(model).items()}

    def assert_computes_with(one: Any, state: dict[str, torch.Tensor]) -> None:
        plain = transformer()
        plain.load_state_dict(state)
        expected = loss_of(plain, tokens(rank, 1))
        torch.testing.assert_close(loss_of(one, tokens(rank, 1)), expected)

    torch_functions.set_model_state_dict(
        model, dict(state), options=torch_functions.StateDictOptions(full_state_dict=True)
    )
    assert_computes_with(model, state)
    other = copy.deepcopy(model)
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    assert_computes_with(model, {name: value * 3 for name, value in state.items()})
    assert_computes_with(other, state)
    step(other, adamw(other))
    assert_computes_with(other, full_state(other))
    assert_computes_with(model, {name: value * 3 for name, value in state.items()})


@ranks(4)
def test_a_write_that_nobody_counts_is_refused_by_name(rank, world_size):
    model = in_copies("composable", transformer())
    with torch.no_grad():
        loss_of(model, tokens(rank, 0))
        for param in model.parameters():
            param.to_local().data.mul_(2)
        with pytest.raises(RuntimeError, match=r"'embed\.weight', or .*`\.data`.*on rank \d"):
            loss_of(model, tokens(rank, 0))


@pytest.mark.parametrize("front", ["orig", "composable"])
@ranks(4)
def test_beside_tensor_parallelism(rank, world_size, front):
    """Two copies of one rank each: shards lie over both, and parts of tensor parallelism within."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "dp", "tp"))
    models = []
    for over in (False, True):
        model: Any = mesh_nets.net(5)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model.blocks["0"], mesh["tp"], plan)
        data = mesh["replicate", "dp"]
        if front == "composable":
            for block in model.blocks.values():
                fully_shard(block, mesh=data, state_over_replicas=over)
            fully_shard(model, mesh=data, state_over_replicas=over)
        else:
            model = FSDP(
                model,
                device_mesh=data,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block}),
                use_orig_params=True,
                state_over_replicas=over,
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            mesh_nets.train(model, optimizer, number)
        models.append(model)
    whole, one = (Side(model, flatten_optimizer_state_dict=True) for model in models)
    values = [side.state(full_state_dict=True)["model"] for side in (whole, one)]
    for name, value in values[0].items():
        torch.testing.assert_close(full(values[1][name]), full(value), rtol=0, atol=0, msg=name)
    if front == "composable":
        param = models[1].blocks["0"].up.weight
        assert isinstance(param, DTensor) and param.device_mesh.mesh_dim_names == ("replicate_dp", "tp")
