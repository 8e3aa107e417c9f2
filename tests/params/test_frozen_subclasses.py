"""Frozen tensor subclasses that only tell of which tensors they are made, below both front-ends."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
from fronts import each_form
from fsdp_wrap import (
    CPUOffload,
    IntervalTensor,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    iter_full_params,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block
from params.subclasses import Mute

HIDDEN, BLOCKS = 5, 3


def net(seed: int = 0, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [Block().double() for _ in range(BLOCKS)]
    for block in blocks:
        block.up.weight = nn.Parameter(Mute.of(block.up.weight.detach()), requires_grad=False)
        if checkpointed:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return nn.Sequential(*blocks)


def wrapped(model: nn.Module, **options: Any) -> Any:
    options = {"use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    return FSDP(model, shared_memory=False, **options)


def sharded(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, shared_memory=False, **options)
    return fully_shard(model, shared_memory=False, **options)


def inputs(world_size: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(world_size, 4, WIDTH, dtype=torch.float64, generator=generator)


def train(model: Any, reference: nn.Module, rank: int, world_size: int) -> None:
    trained = [[each for each in which.parameters() if each.requires_grad] for which in (model, reference)]
    for step in range(3):
        x = inputs(world_size, step)
        wanted = [reference(part).square().mean() for part in x]
        (sum(wanted) / world_size).backward()
        loss = model(x[rank]).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, wanted[rank], rtol=0, atol=1e-12)
        for params in trained:
            optimizer = torch.optim.SGD(params, 0.1)
            optimizer.step()
            optimizer.zero_grad()


def assert_same_state(found: Any, wanted: Any) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is type(value), name
        if type(value) is Mute:
            for inner in ("rows", "scales", "added"):
                assert torch.equal(getattr(found[name], inner), getattr(value, inner)), (name, inner)
        else:
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


FAST = ("full", "hybrid", "checkpointed")
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": False},
    "offload": {"cpu_offload": CPUOffload(True)},
    "checkpointed": {},
    "root_alone": {"auto_wrap_policy": None},
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[] if how in FAST else pytest.mark.slow) for how in HOW]
)
@ranks(4)
def test_the_wrapper_computes_as_a_plain_model(rank, world_size, how):
    options = dict(HOW[how])
    if how == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    reference, model = net(), wrapped(net(checkpointed=how == "checkpointed"), **options)
    train(model, reference, rank, world_size)
    assert_same_state(model.state_dict(), reference.state_dict())
    shown = {name: param for name, param in model.named_parameters() if param.dtype == torch.uint8}
    assert len(shown) == BLOCKS and not any(param.requires_grad for param in shown.values())
    if how in ("full", "offload"):
        bytes_of_one = sum(-(-nbytes // 16) * 16 for nbytes in (HIDDEN * WIDTH, HIDDEN * 4, 8))
        held = torch.tensor([param.numel() for param in shown.values()])
        dist.all_reduce(held)
        assert held.tolist() == [bytes_of_one] * BLOCKS


@ranks(4)
def test_fully_shard_computes_as_a_plain_model(rank, world_size):
    for options in ({}, {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))}):
        reference, model = net(), sharded(net(), **options)
        train(model, reference, rank, world_size)
        local, whole = model[1].up.weight.to_local(), reference[1].up.weight
        parts, at = (4, rank) if not options else (2, rank % 2)
        chunk = -(-HIDDEN // parts)
        assert type(local) is Mute and torch.equal(local.rows, whole.rows[at * chunk : (at + 1) * chunk])
        assert torch.equal(local.added, whole.added)
        twin, x = copy.deepcopy(model), inputs(1)[0]
        assert torch.equal(twin(x), model(x)) and type(twin[0].up.weight.to_local()) is Mute


@ranks(2)
def test_they_travel_as_they_are_stored_and_are_freed(rank, world_size):
    before = live_bytes()
    wide = nn.Linear(512, 512, dtype=torch.float64, bias=False)
    wide.weight = nn.Parameter(Mute.of(wide.weight.detach()), requires_grad=False)
    model = FSDP(wide, shared_memory=False)
    del wide
    with torch.no_grad(), count_collectives(objects=False) as counted:
        model(torch.randn(1, 512, dtype=torch.float64))
    stored = 512 * 512 + 512 * 4 + 16
    assert stored <= counted["all_gather_into_tensor"].bytes <= stored + 256
    assert live_bytes() - before < 0.6 * stored, "half of the bytes, and none of what was gathered"


@ranks(2)
def test_full_parameters_are_of_the_subclass_and_may_be_edited(rank, world_size):
    reference, model = net(), wrapped(net())
    x = inputs(1)[0]
    model(x)
    for offload in (False, True):
        with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=offload):
            assert_same_state(model.state_dict(), reference.state_dict())
            model[0].up.weight.rows.zero_()
        assert torch.equal(model(x), reference(x))
    other = net(1)
    with FSDP.summon_full_params(model), torch.no_grad():
        for block, plain in zip(model.module, reference):
            block.up.weight.scales.mul_(2)
            plain.up.weight.scales.mul_(2)
        model[1].up.weight = copy.deepcopy(other[1].up.weight)
    reference[1].up.weight = other[1].up.weight
    assert torch.equal(model(x), reference(x))
    with FSDP.summon_full_params(model, rank0_only=True), torch.no_grad():
        if rank == 0:
            model[2].up.weight.added.fill_(0.25)
    with torch.no_grad():
        reference[2].up.weight.added.fill_(0.25)
    assert torch.equal(model(x), reference(x))
    with pytest.raises(ValueError, match="up.weight' was replaced inside summon_full_params"):
        with FSDP.summon_full_params(model):
            model[0].up.weight = nn.Parameter(torch.zeros(HIDDEN, WIDTH), requires_grad=False)
    found, wanted = iter_full_params(model), reference.named_parameters()
    assert_same_state(*({name: value.detach() for name, value in each} for each in (found, wanted)))
    twin = copy.deepcopy(model)
    with FSDP.summon_full_params(twin), torch.no_grad():
        twin[0].up.weight.added.fill_(1.0)
    assert torch.equal(model(x), reference(x)) and not torch.equal(twin(x), model(x))


class Listens(Block):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@each_form
@ranks(2)
def test_state_dicts(rank, world_size, use_orig_params, tmp_path):
    reference, x, form = net(), inputs(1)[0], {"use_orig_params": use_orig_params}
    model = wrapped(net(), **form)
    full = model.state_dict()
    assert_same_state(full, reference.state_dict())
    plain = net(1)
    plain.load_state_dict(full)
    assert torch.equal(plain(x), reference(x))
    for how in (Block, Listens):
        fresh: Any = net(1)
        for block in fresh:
            block.__class__ = how
        other = wrapped(fresh, auto_wrap_policy=ModuleWrapPolicy({how}), **form)
        other(x)
        other.load_state_dict(reference.state_dict())
        assert torch.equal(other(x), reference(x)), how

    def load(other: Any, kind: StateDictType, group: Any = None) -> None:
        with FSDP.state_dict_type(other, kind):
            target = other.state_dict()
            dcp.load(target, checkpoint_id=tmp_path / kind.name, process_group=group)
            other.load_state_dict(target)
        assert torch.equal(other(x), reference(x)), kind

    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            state = model.state_dict()
        assert "LOCAL" in kind.name or isinstance(state["0.up.weight"], IntervalTensor)
        dcp.save(state, checkpoint_id=tmp_path / kind.name)
        load(wrapped(net(1), **form), kind)
    alone = dist.new_group([rank], use_local_synchronization=True)  # saved by two ranks, loaded by one
    other = wrapped(net(1), device_mesh=DeviceMesh.from_group(alone, "cpu"), **form)
    load(other, StateDictType.SHARDED_STATE_DICT, alone)


@ranks(2)
def test_other_values_are_refused_by_name_and_those_of_the_first_rank_sent(rank, world_size):
    model, reference, x = wrapped(net(rank), sync_module_states=True), net(), inputs(1)[0]
    assert_same_state(model.state_dict(), reference.state_dict())
    state, wider = model.state_dict(), nn.Linear(WIDTH + 1, HIDDEN, dtype=torch.float64).weight.detach()
    for value, said in (
        (state["1.up.weight"].values(), "Tensor of shape.*the model a Mute of shape"),
        (Mute.of(wider), "a Mute of shape .5, 7.*the model a Mute of shape .5, 6"),
    ):
        state["1.up.weight"] = value
        with pytest.raises(RuntimeError, match=f"1.up.weight.*{said}"):
            model.load_state_dict(state)
    assert torch.equal(model(x), reference(x))


@ranks(2)
def test_what_cannot_be_kept_is_refused_by_name(rank, world_size):
    trains, nested = net(), net()
    trains[1].up.weight = nn.Parameter(trains[1].up.weight.detach(), requires_grad=True)
    inner = nested[1].up.weight.detach()
    nested[1].up.weight = nn.Parameter(Mute(inner, inner.scales, inner.added), requires_grad=False)
    for model, said in (
        (trains, "'1.up.weight' is a Mute that trains.*freeze.*fully_shard"),
        (nested, "'1.up.weight' is a Mute that is made of subclasses itself"),
    ):
        with pytest.raises(TypeError, match=said):
            FSDP(model)
        assert type(model) is nn.Sequential and type(model[1].up.weight) is Mute
        FSDP(model, ignored_states=[model[1].up.weight])  # type: ignore[arg-type]
