"""Frozen tensor subclasses that only tell of which tensors they are made, below both front-ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from bed import ranks
from bed.memory import live_bytes
from bed.references import count_collectives
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
from params.subclasses import Mute

WIDTH, HIDDEN, BLOCKS = 6, 7, 3


class Block(nn.Module):
    """A frozen matrix beside what trains, perhaps in a checkpoint."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.base, self.side = nn.Linear(WIDTH, HIDDEN).double(), nn.Linear(HIDDEN, WIDTH).double()
        self.base.weight = nn.Parameter(Mute.of(self.base.weight.detach()), requires_grad=False)
        self.checkpointed = checkpointed

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.side(torch.tanh(self.base(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return activation_checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)


def net(seed: int = 0, checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(checkpointed) for _ in range(BLOCKS)))


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


def train(model: Any, reference: nn.Module, rank: int, world_size: int, steps: int = 3) -> None:
    """Trains both, the reference on all parts; losses must be the same."""
    optimizers = [
        torch.optim.SGD([each for each in which.parameters() if each.requires_grad], 0.1)
        for which in (model, reference)
    ]
    for step in range(steps):
        x = inputs(world_size, step)
        wanted = [reference(part).square().mean() for part in x]
        (sum(wanted) / world_size).backward()
        loss = model(x[rank]).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, wanted[rank], rtol=0, atol=1e-12)
        for optimizer in optimizers:
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
        bytes_of_one = HIDDEN * WIDTH + 6 + HIDDEN * 4 + 4 + 8 + 8  # each at a multiple of 16
        held = torch.tensor([param.numel() for param in shown.values()])
        dist.all_reduce(held)
        assert held.tolist() == [bytes_of_one] * BLOCKS


@ranks(4)
def test_fully_shard_computes_as_a_plain_model(rank, world_size):
    for options in ({}, {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))}):
        reference, model = net(), sharded(net(), **options)
        train(model, reference, rank, world_size)
        weight = model[1].base.weight
        local, whole = weight.to_local(), reference[1].base.weight
        parts, at = (4, rank) if not options else (2, rank % 2)
        chunk = -(-HIDDEN // parts)
        assert type(local) is Mute and torch.equal(local.rows, whole.rows[at * chunk : (at + 1) * chunk])
        assert torch.equal(local.added, whole.added)
        twin = copy.deepcopy(model)
        x = inputs(1)[0]
        assert torch.equal(twin(x), model(x)) and type(twin[0].base.weight.to_local()) is Mute


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
            model[0].base.weight.rows.zero_()
        assert torch.equal(model(x), reference(x))
    other = net(1)
    with FSDP.summon_full_params(model), torch.no_grad():
        for block, plain in zip(model.module, reference):
            block.base.weight.scales.mul_(2)
            plain.base.weight.scales.mul_(2)
        model[1].base.weight = copy.deepcopy(other[1].base.weight)
    reference[1].base.weight = other[1].base.weight
    assert torch.equal(model(x), reference(x))
    with FSDP.summon_full_params(model, rank0_only=True), torch.no_grad():
        if rank == 0:
            model[2].base.weight.added.fill_(0.25)
    with torch.no_grad():
        reference[2].base.weight.added.fill_(0.25)
    assert torch.equal(model(x), reference(x))
    with pytest.raises(ValueError, match="base.weight' was replaced inside summon_full_params"):
        with FSDP.summon_full_params(model):
            model[0].base.weight = nn.Parameter(torch.zeros(HIDDEN, WIDTH), requires_grad=False)
    found = dict(iter_full_params(model))
    assert_same_state(
        {name: value.detach() for name, value in found.items()},
        {name: value.detach() for name, value in reference.named_parameters()},
    )


class Listens(Block):
    """Loads in a way of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@ranks(2)
def test_state_dicts(rank, world_size, use_orig_params, tmp_path):
    reference, x, form = net(), inputs(1)[0], {"use_orig_params": use_orig_params}
    model = wrapped(net(), **form)
    full = model.state_dict()
    assert_same_state(full, reference.state_dict())
    plain = net(1)
    plain.load_state_dict(full)
    assert torch.equal(plain(x), reference(x))
    for listens in (False, True):
        other: Any = net(1)
        if listens:
            for block in other:
                block.__class__ = Listens
        other = wrapped(other, auto_wrap_policy=ModuleWrapPolicy({Block, Listens}), **form)
        other(x)
        other.load_state_dict(reference.state_dict())
        assert torch.equal(other(x), reference(x)), listens
    for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        other = wrapped(net(1), **form)
        with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
            dcp.save(model.state_dict(), checkpoint_id=tmp_path / kind.name)
            target = other.state_dict()
            dcp.load(target, checkpoint_id=tmp_path / kind.name)
            other.load_state_dict(target)
        assert torch.equal(other(x), reference(x)), kind
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["0.base.weight"], IntervalTensor)
    alone = dist.new_group([rank], use_local_synchronization=True)  # saved by two ranks, loaded by one
    other = wrapped(net(1), device_mesh=DeviceMesh.from_group(alone, "cpu"), **form)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        target = other.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / "SHARDED_STATE_DICT", process_group=alone)
        other.load_state_dict(target)
    assert torch.equal(other(x), reference(x))


@ranks(2)
def test_other_values_are_refused_by_name_and_those_of_the_first_rank_sent(rank, world_size):
    model, reference, x = wrapped(net(rank), sync_module_states=True), net(), inputs(1)[0]
    assert_same_state(model.state_dict(), reference.state_dict())
    state, wider = model.state_dict(), nn.Linear(WIDTH + 1, HIDDEN, dtype=torch.float64).weight.detach()
    for value, said in (
        (state["1.base.weight"].values(), "Tensor of shape.*the model a Mute of shape"),
        (Mute.of(wider), "a Mute of shape .7, 7.*the model a Mute of shape .7, 6"),
    ):
        state["1.base.weight"] = value
        with pytest.raises(RuntimeError, match=f"1.base.weight.*{said}"):
            model.load_state_dict(state)
    assert torch.equal(model(x), reference(x))


@ranks(2)
def test_what_cannot_be_kept_is_refused_by_name(rank, world_size):
    trains = net()
    trains[1].base.weight = nn.Parameter(trains[1].base.weight.detach(), requires_grad=True)
    with pytest.raises(TypeError, match="'1.base.weight' is a Mute that trains.*freeze.*fully_shard"):
        FSDP(trains)
    nested = net()
    inner = nested[1].base.weight.detach()
    nested[1].base.weight = nn.Parameter(Mute(inner, inner.scales, inner.added), requires_grad=False)
    with pytest.raises(TypeError, match="'1.base.weight' is a Mute that is made of subclasses itself"):
        FSDP(nested)
    for model in (trains, nested):
        assert type(model) is nn.Sequential and type(model[1].base.weight) is Mute
        FSDP(model, ignored_states=[model[1].base.weight])  # type: ignore[arg-type]


def values_of(weight: torch.Tensor) -> torch.Tensor:
    return weight.values() if isinstance(weight, Mute) else weight.detach().clone()


@pytest.mark.parametrize("kind", ["subclass", "plain"])
@pytest.mark.parametrize("how", ["wrapper", "fully_shard"])
@ranks(2)
def test_a_frozen_leaf_that_somebody_keeps_stays_readable(rank, world_size, how, kind):
    plain = net()
    for block in plain if kind == "plain" else ():
        block.base.weight = nn.Parameter(values_of(block.base.weight), requires_grad=False)
    model, wanted = copy.deepcopy(plain), values_of(plain[1].base.weight)
    if how == "wrapper":
        model = wrapped(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    else:
        sharded(model, reshard_after_forward=False)
    x = inputs(1)[0]
    output = model(x)
    held: Any = model[1].base.weight
    assert torch.equal(values_of(held), wanted)
    output.sum().backward()
    if how == "fully_shard":
        model[1].reshard()
    assert model[1].base.weight is not held
    assert torch.equal(values_of(held), wanted), "the graph that held it as well has gone"
    output = model(x)
    assert torch.equal(output, plain(x)) and torch.equal(values_of(held), wanted)
    del held, output
    model(x).sum().backward()
    assert torch.equal(model(x), plain(x))


@ranks(2)
def test_a_copy_has_its_own(rank, world_size):
    model, x = wrapped(net()), inputs(1)[0]
    model(x)
    twin = copy.deepcopy(model)
    with FSDP.summon_full_params(twin), torch.no_grad():
        twin[0].base.weight.added.fill_(1.0)
    assert torch.equal(model(x), net()(x)) and not torch.equal(twin(x), model(x))
    reference = net()
    with torch.no_grad():
        reference[0].base.weight.added.fill_(1.0)
    train(twin, reference, rank, world_size)
