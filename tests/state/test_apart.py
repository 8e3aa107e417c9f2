"""Loads and edits by one rank alone: all ranks are told before the next step. Right ones are silent."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from bed import ranks
from beside import mean_backward
from fronts import FRONTS, HYBRID, full_state, inner, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, StateDictType
from fsdp_wrap.replicate import replicate
from fsdp_wrap.wrap import ModuleWrapPolicy

APART = "^ranks have loaded or edited apart: rank 0 .*, after 1 {}, the last for {}.* while rank 1 "


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh())


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3)).double()


def made(front: str) -> Any:
    module, policy = net(0), ModuleWrapPolicy({Block})
    if front == "replicate":
        for child in (module[0], module[1], module):
            replicate(child)
        return module
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD} if front == "NO_SHARD" else {}
    return shard("orig" if options else front, module, policy, **options)


def loadable(module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a full state dict as a module takes it: `DTensor`s where it has them."""
    own = {name: param for name, param in module.named_parameters() if isinstance(param, DTensor)}
    return {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements, src_data_rank=None)
        if name in own
        else value
        for name, value in state.items()
    }


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * number + rank)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(batch(rank, number)).square().sum()


def backward(model: nn.Module, rank: int, number: int) -> None:
    loss(model, number, rank).backward()


def load(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(loadable(model, net(1).state_dict()))


def load_some(model: Any, optimizer: torch.optim.Optimizer) -> None:
    names = ("1.0.weight", "1.0.bias")
    state = {name: value for name, value in net(1).state_dict().items() if name in names}
    model.load_state_dict(loadable(model, state), strict=False)


def load_unit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    unit = inner(model)[1]
    unit.load_state_dict(loadable(unit, net(1)[1].state_dict()))


def edit(model: Any, optimizer: torch.optim.Optimizer) -> None:
    with FSDP.summon_full_params(model):
        inner(model)[1][0].weight.data.mul_(0.5)


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].zero_()
    optimizer.load_state_dict(state)


WAYS: dict[Callable[..., None], tuple[str, str]] = {
    load: ("load", "the root unit"),
    load_some: ("load", ""),
    load_unit: ("load", "unit '1'"),
    edit: ("edit", "unit '1'"),
    load_optimizer: ("optimizer load", "the root unit"),
}
CASES = [
    *((front, load) for front in (*FRONTS, "NO_SHARD", "replicate")),
    ("flat", load_some),
    ("composable", load_some),
    ("orig", load_unit),
    ("composable", load_unit),
    ("NO_SHARD", edit),
    ("replicate", edit),
    ("flat", load_optimizer),
    ("composable", load_optimizer),
]


@pytest.mark.parametrize(("front", "way"), CASES)
@ranks(2)
def test_what_one_rank_does_alone_is_an_error_of_all_before_the_next_step(rank, world_size, front, way):
    model = made(front)
    optimizer = adam(model)
    backward(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        way(model, optimizer)
    with pytest.raises(RuntimeError, match=APART.format(*WAYS[way])):
        backward(model, rank, 1)


@ranks(4)
def test_ranks_of_other_copies_are_told(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard("orig", net(0), ModuleWrapPolicy({Block}), sharding_strategy=HYBRID, device_mesh=mesh)
    if rank == 0:
        model.load_state_dict(net(1).state_dict())
    with pytest.raises(RuntimeError, match=APART.format("load", "the root unit")):
        backward(model, rank, 1)


@ranks(2)
def test_edits_that_each_rank_makes_by_itself_inside_of_a_common_context_are_told(rank, world_size):
    model = made("orig")
    with FSDP.summon_full_params(model):
        if rank == 0:
            with torch.no_grad():
                inner(model)[2].bias.add_(1.0)
    with pytest.raises(RuntimeError, match=APART.format("edit", "the root unit")):
        backward(model, rank, 1)


def load_from_first(model: Any) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, net(2).state_dict() if dist.get_rank() == 0 else {}, options=options)


def load_in_turns(model: Any) -> None:
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            load(model, adam(model))
        dist.barrier()


def load_pieces(model: Any) -> None:
    """As FSDP programs save and load; `fully_shard` has only one kind."""
    if isinstance(model, FSDP):
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(model.state_dict())
    else:
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("front", [*FRONTS, "NO_SHARD", "replicate"])
@ranks(2)
def test_what_all_ranks_do_is_silent_and_right(rank, world_size, front):
    """So is what one rank does alone with a copy that does not communicate, and looking at parameters."""
    model, plain = made(front), net(0)
    for number, change in enumerate([load_from_first, load_in_turns, load_pieces]):
        optimizer, theirs = adam(model), adam(plain)
        for _ in range(2):
            backward(model, rank, number)
            mean_backward(partial(loss, plain, number))
            for stepped in (optimizer, theirs):
                load_optimizer(model, stepped)
                stepped.step()
                stepped.zero_grad()
        if front in ("NO_SHARD", "replicate") and rank == 0:
            best = copy.deepcopy(model)
            best.load_state_dict(model.state_dict())
            best.eval()
            with torch.no_grad():
                best(batch(rank, number))
            with FSDP.summon_full_params(model):
                assert all(param.isfinite().all() for param in model.parameters())
        change(model)
        new = {load_from_first: net(2), load_in_turns: net(1)}.get(change, plain)
        plain.load_state_dict(new.state_dict())
        edit(model, optimizer)
        plain[1][0].weight.data.mul_(0.5)
    backward(model, rank, 9)
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)
