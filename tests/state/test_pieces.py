"""Values of sharded state dicts, used as the `DTensor`s and `ShardedTensor`s that torch has there."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import IntervalTensor, ShardingStrategy
from fsdp_wrap._params.held_by import Intervals
from fsdp_wrap._params.interval_tensor import PASSES_FOR_DTENSOR
from fsdp_wrap.distributed_state_dict import pieces_of_model
from state_nets import LOCAL, SHARDED, Block, Net, load, per_block, take, whole


@pytest.mark.parametrize(
    ("strategy", "with_mesh", "use_orig_params"),
    [
        ("FULL_SHARD", False, False),
        ("HYBRID_SHARD", False, True),
        ("HYBRID_SHARD", True, False),
        ("NO_SHARD", True, True),
    ],
)
@ranks(4)
def test_as_dtensors(rank, world_size, strategy, with_mesh, use_orig_params):
    mesh = init_device_mesh("cpu", (2, 2) if strategy == "HYBRID_SHARD" else (4,)) if with_mesh else None
    plain = Block().double()
    model = FSDP(
        copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
        use_orig_params=use_orig_params,
    )
    with count_collectives() as counts:
        state = pieces_of_model(model)
        for value in state.values():
            assert isinstance(value, IntervalTensor) and isinstance(value, DTensor) == PASSES_FOR_DTENSOR
            assert value.device_mesh == (mesh or value.device_mesh)
            assert len(value.placements) == value.device_mesh.ndim
            assert value.to_local().numel() == value.piece.numel() == value._local_tensor.numel()
            same = value.redistribute(placements=value.placements)
            assert same.placements == value.placements and torch.equal(same.to_local(), value.to_local())
    assert counts == {}
    for name, expected in plain.state_dict().items():
        assert torch.equal(state[name].full_tensor(), expected), name
        ndim = state[name].device_mesh.ndim
        last = Shard(0) if expected.dim() else Replicate()
        placed = state[name].redistribute(placements=[*[Replicate()] * (ndim - 1), last])
        assert type(placed) is DTensor and torch.equal(placed.full_tensor(), expected), name
        if strategy == "NO_SHARD":
            assert set(state[name].placements) == {Replicate()}
            assert torch.equal(state[name].to_local(), expected), name


@ranks(2)
def test_placements_say_rows_where_every_rank_has_just_these(rank, world_size):
    for shape, by_rows in (((6, 4), True), ((5, 4), False), ((3, 3), False), ((4,), True)):
        model = FSDP(nn.ParameterList([nn.Parameter(torch.randn(shape))]))
        (value,) = take(model, SHARDED).values()
        (placement,) = value.placements
        full = value.full_tensor()
        if by_rows:
            assert placement == Shard(0) and torch.equal(value.to_local(), full.chunk(2)[rank])
        else:
            assert placement == Intervals() != Shard(0) and not placement.is_shard()
            assert value.to_local().dim() == 1
        assert value.dim() == len(shape) and value.local_tensor().numel() == value.to_local().numel()


@ranks(4)
def test_full_tensors_come_from_the_ranks_that_hold_them(rank, world_size):
    """Each half of the ranks has a model of its own; nobody else takes part."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    plain = Net().double()
    state = take(per_block(copy.deepcopy(plain), process_group=halves[rank // 2]), SHARDED)
    if rank < 2:
        for name, expected in plain.state_dict().items():
            assert torch.equal(state[name].full_tensor(), expected), name
            assert state[name].device_mesh.mesh.tolist() == [0, 1]
    dist.barrier()


@pytest.mark.parametrize(("kind", "use_orig_params"), [(SHARDED, False), (SHARDED, True), (LOCAL, True)])
@ranks(3)
def test_as_sharded_tensors(rank, world_size, kind, use_orig_params):
    model = per_block(Net().double(), use_orig_params=use_orig_params)
    state = take(model, kind)
    with count_collectives() as counts:
        told = {name: value.metadata() for name, value in state.items()}
    assert counts == {}
    for name, value in state.items():
        covered = torch.zeros(value.shape)
        for each in told[name].shards_metadata:
            where = tuple(slice(at, at + size) for at, size in zip(each.shard_offsets, each.shard_sizes))
            covered[where] += 1
        assert covered.min() == covered.max() == 1 and told[name].size == value.shape, name
        mine = [each for each in told[name].shards_metadata if each.placement.rank() == rank]
        shards = value.local_shards()
        assert [shard.metadata for shard in shards] == mine
        assert [shard.metadata for shard in value._local_shards] == mine
        assert torch.equal(
            torch.cat([shard.tensor.flatten() for shard in shards] or [value.piece]), value.piece
        )


@pytest.mark.parametrize(("kind", "use_orig_params"), [(SHARDED, True), (LOCAL, False)])
@ranks(2)
def test_pieces_from_a_file_equal_those_saved(rank, world_size, kind, use_orig_params):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if kind is SHARDED else None
    model = whole(Net().double(), use_orig_params=use_orig_params, device_mesh=mesh)
    state, stored = pieces_of_model(model) if mesh else take(model, kind), io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    read = torch.load(stored, weights_only=True)
    for name in ("stem.weight", "shift") if kind is SHARDED else state:
        value = state[name]
        copies = (copy.deepcopy(value), value.cpu(), value.detach(), value.clone(), value + 0)
        for other in (read[name], *copies):
            torch.testing.assert_close(other, value, rtol=0, atol=0)
            assert torch.equal(other, value) and torch.allclose(other, value)
            assert bool((other == value).all())
            assert other.device_mesh == value.device_mesh and other.placements == value.placements
        assert torch.equal(read[name].full_tensor(), value.full_tensor())
    load(model, kind, read)


@ranks(2)
def test_pieces_whose_ranks_are_not_known(rank, world_size):
    value = IntervalTensor(torch.Size((2, 3)), 3 * rank, torch.arange(3.0) + 3 * rank)
    assert torch.equal(value.full_tensor(), torch.arange(6.0).view(2, 3))
    assert value.device_mesh == DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert value.placements == (Intervals(),)
    with pytest.raises(RuntimeError, match="made by hand"):
        value.metadata()


@ranks(2)
def test_pieces_do_not_combine_with_dtensors(rank, world_size):
    (value,) = take(FSDP(nn.ParameterList([nn.Parameter(torch.randn(5, 3))])), SHARDED).values()
    other = DTensor.from_local(torch.ones(5, 3), value.device_mesh, [Replicate()])
    with pytest.raises((AttributeError, RuntimeError, TypeError)):
        other.copy_(value)
    with pytest.raises(AttributeError, match="use full_tensor"):
        _ = value._spec
