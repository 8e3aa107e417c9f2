"""`weight_changes`: what changed travels, and a receiver that applies it has the trainer's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moe_nets
from bed import ranks
from fronts import either_front, full_state, shard
from fsdp_wrap import ShardingStrategy, fully_shard, weight_changes
from fsdp_wrap.weights import Change, Changes, apply_changes, checksum
from sent_weights import POLICY, WIDTH, net, step


def add_to_some(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.view(-1)[:1].add_(1)


def whole(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype or value.dtype, copy=True) for name, value in full_state(model).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def follows(model: nn.Module, dtype: torch.dtype | None = None, change: Callable[..., None] = step) -> None:
    """A receiver on the first rank has what the trainer has, after each step, by the changes alone."""
    receiver, changes = whole(model, dtype), weight_changes(model, dtype)
    for _ in range(3):
        before = whole(model, dtype)
        change(model)
        now, changed = whole(model, dtype), changes.collect()
        if dist.get_rank() > 0:
            assert not changed and not changed.checksums
            continue
        expected = sum(int((bits(now[name]) != bits(before[name])).sum()) for name in now)
        assert sum(len(delta.index) for delta in changed) == expected
        assert changed.nbytes == sum(len(delta.index) * (8 + delta.value.itemsize) for delta in changed)
        apply_changes(receiver, changed)
        for name, value in now.items():
            assert torch.equal(receiver[name], value), name
            assert changed.checksums[name] == checksum(value)


@pytest.mark.parametrize("policy", [POLICY, None], ids=["layers", "whole"])
@pytest.mark.parametrize(("front", "dtype"), [("orig", None), ("composable", torch.bfloat16)])
@ranks(3)
def test_a_receiver_follows(rank, world_size, front, dtype, policy):
    follows(shard(front, net(), policy), dtype)


@ranks(4)
def test_replicas_tell_once_and_tensor_parallelism_is_undone(rank, world_size):
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD):
        mesh = init_device_mesh("cpu", (2, 2)) if strategy is ShardingStrategy.HYBRID_SHARD else None
        follows(shard("orig", net(), POLICY, sharding_strategy=strategy, device_mesh=mesh))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = net(hidden=8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh["dp"])
    torch.manual_seed(1)
    follows(fully_shard(model, mesh=mesh["dp"]))


@ranks(4)
def test_over_experts_whose_ranks_hold_other_rows_of_all_else(rank, world_size):
    data, own, spread = moe_nets.meshes()
    model = moe_nets.distribute(moe_nets.net(), spread)
    places = moe_nets.placing(moe_nets.info_of(own))
    moe_nets.shard(model, fully_shard, mesh=data, shard_placement_fn=places)
    follows(model, change=add_to_some)


@ranks(2)
def test_checksums_are_those_of_all_elements_however_few_changed_since(rank, world_size):
    """They are kept up to date by what changed, also in rounds in which nobody wants them."""
    model = shard("orig", net(), POLICY)
    changes = weight_changes(model, torch.bfloat16)
    rounds = [(step, True), (add_to_some, True), (add_to_some, False), (step, False), (add_to_some, True)]
    for change_it, wanted in rounds:
        change_it(model)
        changed, now = changes.collect(checksums=wanted), whole(model, torch.bfloat16)
        sums = {name: checksum(value) for name, value in now.items()}
        assert changed.checksums == (sums if rank == 0 and wanted else {})


@ranks(2)
def test_what_did_not_change_is_not_told(rank, world_size):
    model = shard("composable", net(), POLICY)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(float("nan"))  # which does not equal itself
    changes = weight_changes(model)
    changed = changes.collect()
    assert len(changed) == 0 and len(changed.checksums) == (6 if rank == 0 else 0)

    model = net()  # what is no floating number, and outside of units
    model.count = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    fully_shard(model[0])
    changes = weight_changes(model, torch.bfloat16)
    with torch.no_grad():
        model.count[1] = 5
    changed = changes.collect()
    if rank == 0:
        ((name, index, value),) = changed
        assert (name, index.tolist(), value.tolist()) == ("count", [1], [5])


@either_front
@ranks(2)
def test_buffers_go_along(rank, world_size, front):
    model = shard(front, nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)), POLICY)
    changes, without = weight_changes(model, torch.bfloat16), weight_changes(model, buffers=False)
    receiver = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
    receiver.load_state_dict(full_state(model))
    torch.manual_seed(rank)  # statistics differ between ranks
    step(model)
    changed, few = changes.collect(), without.collect()
    expected = full_state(model)
    if rank == 0:
        apply_changes(receiver.state_dict(), changed)
        assert receiver[1].num_batches_tracked == 1
        for name, value in receiver.state_dict().items():
            assert torch.equal(value, expected[name].to(value.dtype)), name
        assert not [change.name for change in few if "running" in change.name]


def change(value: float = 1.0, index: int = 1, dtype: torch.dtype = torch.float32) -> Change:
    return Change("w", torch.tensor([index]), torch.tensor([value], dtype=dtype))


def test_a_receiver_that_missed_something_is_told_and_keeps_what_it_has():
    state = {"w": torch.arange(4.0).view(2, 2), "other": torch.ones(2)}
    after = torch.tensor([[0.0, 9.0], [2.0, 3.0]])
    sums = {"w": checksum(after), "other": checksum(torch.ones(2))}
    apply_changes(state, Changes([change(9.0)], sums))
    assert torch.equal(state["w"], after)
    for wrong in (Changes([change(8.0)], sums), Changes([], sums | {"other": 1})):
        with pytest.raises(RuntimeError, match="would not be what the trainer has"):
            apply_changes(state, wrong)
        assert torch.equal(state["w"], after)
    state = {"w": torch.zeros(2, 3).t()}  # is not contiguous
    apply_changes(state, Changes([change(5.0, index=2)]))
    assert state["w"].reshape(-1).tolist() == [0, 0, 5, 0, 0, 0]


def test_changes_that_do_not_fit_are_refused():
    state = {"w": torch.zeros(4), "other": torch.zeros(4)}
    for wrong, words in [
        (change(dtype=torch.bfloat16), "is of torch.float32, and its changes of torch.bfloat16"),
        (change(index=4), "has 4 elements, have indices from 4 to 4"),
        (change(index=-1), "indices from -1 to -1"),
        (change()._replace(index=torch.tensor([3, 0, 3]), value=torch.ones(3)), "the same index twice"),
        (change()._replace(index=torch.tensor([1, 2])), r"\(2,\) torch.int64 indices and \(1,\) values"),
        (change()._replace(index=torch.tensor([True])), "torch.bool indices"),
        (change()._replace(name="other"), "'other' comes twice"),
        (change()._replace(name="v"), "there is no 'v'"),
    ]:
        with pytest.raises(ValueError, match=words):
            apply_changes(state, Changes([change()._replace(name="other"), wrong]))
    assert not state["w"].any() and not state["other"].any()


def test_checksums_tell_places_and_bits():
    one = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(one) == checksum(one.view(3, 1))
    others = [one.flip(0), torch.tensor([1.0, 2.0, 3.0000002]), one[:2], one.double(), -one]
    assert len({checksum(value) for value in (one, *others)}) == 6
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@ranks(2)
def test_what_is_refused(rank, world_size):
    model, meta = shard("orig", net(), POLICY), nn.Linear(2, 2, device="meta")
    for given, dtype, error, words in (
        (model, "bf16", TypeError, "must be a torch.dtype"),
        (model, torch.int8, ValueError, "floating-point"),
        (meta, None, RuntimeError, "'weight' is on the meta device"),
    ):
        with pytest.raises(error, match=words):
            weight_changes(given, dtype)  # type: ignore[arg-type]
    changes = weight_changes(model)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'extra.weight' is not what it was"):
        changes.collect()


def test_a_copy_of_a_model_has_its_own_snapshots():
    model = nn.Linear(2, 2)
    changes = weight_changes(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.add_(1)
    assert not changes.collect() and len(weight_changes(twin).collect()) == 0
    with torch.no_grad():
        model.weight[1, 0] += 1
    ((name, index, _),) = changes.collect()
    assert name == "weight" and index.tolist() == [2]
