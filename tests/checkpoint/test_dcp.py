"""Sharded state dicts through torch.distributed.checkpoint: resuming elsewhere, and to and from others."""

from collections.abc import Callable
from itertools import pairwise as pairwise_of
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bed import ranks
from bed.memory import live_bytes, only_new_objects
from bed.references import count_collectives
from composable import shard_blocks
from fronts import chosen, each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardedOptimStateDictConfig, ShardedStateDictConfig, checkpoint
from fsdp_wrap.wrap import ModuleWrapPolicy
from mesh_nets import Side
from optim_states import assert_same, by_name
from resuming import Block, Net, net, per_block_of, train, trained
from state_nets import LOCAL, SHARDED, adamw, assert_equal, per_block, whole


def sharded(model: nn.Module, rows: bool = False) -> Any:
    return FSDP.state_dict_type(
        model,
        SHARDED,
        ShardedStateDictConfig(_use_dtensor=rows),
        ShardedOptimStateDictConfig(_use_dtensor=rows),
    )


@pytest.mark.parametrize("rows", [False, True])
@ranks(4)
def test_the_methods_of_the_wrapper_resume_on_other_ranks_in_another_wrapping(
    rank, world_size, tmp_path, rows
):
    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with sharded(model, rows=rows):
            return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}

    source = per_block_of(net(), use_orig_params=True, **chosen("orig", "HYBRID_SHARD", world_size))
    optimizer, group = adamw(source), dist.new_group([0, 1, 2])
    train(source, optimizer, rank, world_size, range(3))
    dcp.save(state(source, optimizer), checkpoint_id=tmp_path)
    if rank == 3:
        return
    target = FSDP(net(), process_group=group)
    fresh = adamw(target)
    loaded = state(target, fresh)
    dcp.load(loaded, checkpoint_id=tmp_path, process_group=group)
    with sharded(target, rows=rows):
        target.load_state_dict(loaded["model"])
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(target, fresh, loaded["optim"]))
    train(target, fresh, rank, 3, range(3, 6))
    plain, reference = trained(6)
    assert_near(target.state_dict(), plain.state_dict())
    assert_same(FSDP.optim_state_dict(target, fresh), by_name(reference, plain))


def assert_near(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-10, atol=1e-10)


def flattened(model_state: dict[str, Any], optim_state: dict[str, Any]) -> dict[str, torch.Tensor]:
    entries = [(name, *item) for name, entry in optim_state["state"].items() for item in entry.items()]
    return model_state | {f"{name} {key}": value for name, key, value in entries if key != "step"}


@ranks(2)
def test_state_dicts_of_rows_are_torchs(rank, world_size):
    """As `DTensor`s by type, shape, placements and bits; asked for, or implied by a mesh."""
    plain, optimizer = trained(2)
    expected = flattened(plain.state_dict(), by_name(optimizer, plain))
    mesh = init_device_mesh("cpu", (2,))
    for given in ({}, {"device_mesh": mesh}):
        model = per_block_of(net(), use_orig_params=not given, **given)
        ours = adamw(model)
        train(model, ours, rank, world_size, range(2))
        with sharded(model, rows=not given):
            state = flattened(model.state_dict(), FSDP.optim_state_dict(model, ours))
        assert list(state) == list(expected)
        for name, value in state.items():
            rows = distribute_tensor(expected[name], mesh, [Shard(0)]).to_local()
            assert type(value) is DTensor and value.placements == (Shard(0),) and value.device_mesh == mesh
            assert value.to_local().untyped_storage().nbytes() == value.to_local().nbytes
            torch.testing.assert_close(value.to_local(), rows)


def fsdp1(use_orig_params: bool) -> nn.Module:
    policy = TorchModuleWrapPolicy({Block})
    device = torch.device("cpu")
    return TorchFSDP(net(), auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


def fsdp2() -> nn.Module:
    return shard_blocks(net(), fully_shard, mesh=init_device_mesh("cpu", (3,)))


PEERS: dict[str, Callable[[], nn.Module]] = {
    "plain": net,
    "fsdp2": fsdp2,
    "fsdp1": lambda: fsdp1(True),
    "fsdp1_flat": lambda: fsdp1(False),
}


class OverFiles(Side):
    def load(self, way: str, path: Path) -> None:
        """Leaves `ShardedTensor`s alone: one of which a rank has nothing looks like a former version's."""
        state = self.state()
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
        self.take(state)


def train_side(side: Side, rank: int, steps: range) -> None:
    share = (0, 1) if type(side.model) is Net else (rank, 3)  # a plain model sees all batches
    train(side.model, side.optimizer, *share, steps)


@each_form
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("way", ["dcp", "full"])
@pytest.mark.parametrize("giver", ["ours", "theirs"])
@ranks(3)
def test_training_goes_on_elsewhere(rank, world_size, giver, way, peer, use_orig_params, tmp_path):
    sides = {
        "ours": OverFiles(per_block_of(net(), use_orig_params=use_orig_params)),
        "theirs": OverFiles(PEERS[peer]()),
    }
    source = sides.pop(giver)
    (target,) = sides.values()
    train_side(source, rank, range(3))
    source.give(target, way, tmp_path)
    train_side(target, rank, range(3, 5))
    assert_near(target.state(full_state_dict=True)["model"], trained(5)[0].state_dict())


@each_form
@ranks(2)
def test_the_optimizer_of_torchs_wrapper_is_refused_by_step_folders(
    rank, world_size, use_orig_params, tmp_path
):
    """Its parameters are pieces: taken for whole ones, each rank's state would take the others' place."""
    model = fsdp1(use_orig_params)
    optimizer = adamw(model)
    train(model, optimizer, rank, world_size, range(1))
    for name, whole_or_part in (("the model", model), ("module '0'", nn.Sequential(model))):
        with pytest.raises(ValueError, match=f"^{name} is wrapped by torch's FullyShardedDataParallel, "):
            checkpoint.save(tmp_path, whole_or_part, optimizer)
    assert not any(tmp_path.iterdir())
    checkpoint.save(tmp_path, model)  # its values, it gathers itself
    again = net()
    checkpoint.load(tmp_path, again)
    assert_equal(again.state_dict(), model.state_dict())


class Looking(DefaultSavePlanner):
    """Notes live bytes whenever the writer asks for the next item: what it has written it may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.items = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.items += 1
        result = super().resolve_data(write_item)
        self.peak = max(self.peak, live_bytes())
        return result


@ranks(3)
def test_saving_takes_no_memory_and_sends_no_tensors(rank, world_size, tmp_path):
    with only_new_objects():
        sides = [301, 299, 301, 299, 301]  # odd matrices, cut into several boxes
        module = nn.Sequential(*(nn.Linear(*shape, dtype=torch.bfloat16) for shape in pairwise_of(sides)))
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        del module
        optimizer = adamw(model)
        model(torch.randn(3, 301, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        rest, look = live_bytes(), Looking()
        with count_collectives(objects=False) as tensors, count_collectives() as all_of_them:
            state, optim = torch_functions.get_state_dict(model, optimizer)
            writer = dcp.FileSystemWriter(tmp_path, sync_files=False)
            dcp.save({"model": state, "optim": optim}, storage_writer=writer, planner=look)
        assert look.peak - rest < 0.05 * rest
        assert tensors == {} and 0 < sum(traffic.bytes for traffic in all_of_them.values()) < 1_000_000
    own = sum(param.nbytes for param in model.parameters())
    assert look.items >= 12 and look.peak > 3 * own  # it did look
    payload = torch.tensor(3 * own)  # parameters and two averages
    dist.all_reduce(payload)
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert payload - 100 < written < payload + 250_000, "everything is written once"


@each_form
@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
@ranks(4)
def test_local_state_dicts_are_saved_whole(rank, world_size, tmp_path, strategy, use_orig_params):
    """Each rank's flat shard is another part of one tensor: none is taken for a copy of another's."""
    options = chosen("flat", strategy, world_size)
    model, other = (
        per_block(make, use_orig_params=use_orig_params, **options) for make in (net(), Net().double())
    )
    with FSDP.state_dict_type(model, LOCAL), FSDP.state_dict_type(other, LOCAL):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state["model"])
    assert_equal(other.state_dict(), net().state_dict())


@ranks(2)
def test_a_local_state_dict_of_another_rank_is_refused(rank, world_size, tmp_path):
    model = whole(net())
    with FSDP.state_dict_type(model, LOCAL):
        torch.save(model.state_dict(), tmp_path / str(rank))
        dist.barrier()
        mine, others = (torch.load(tmp_path / str(owner)) for owner in (rank, 1 - rank))
        with pytest.raises(RuntimeError, match=r"_flat_param: .*elements .*, this rank .*the ranks"):
            model.load_state_dict(others)
        plain = {name: getattr(value, "piece", value) for name, value in mine.items()}  # as once was saved
        for state in (mine, plain):
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), net().state_dict())
