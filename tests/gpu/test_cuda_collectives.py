"""Each way in which the package asks a process group for a collective, over NCCL on its two streams."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Ranks
from fsdp_wrap._comm.process_group import GroupCommunicator
from on_cuda import no_waiting, on_devices, place_of

DTYPES = ["float64", "float32", "bfloat16", "float16"]
AS_BYTES = ["float8_e4m3fn", "float8_e5m2", "int16", "int64", "int8", "bool"]
LENGTHS = (1, 33, 4096)


def _communicator(device, rank, world_size):
    return GroupCommunicator(Ranks(dist.group.WORLD, rank, world_size), place_of(device, rank))


def _numbers(numel, dtype, place, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (numel,), generator=generator).to(getattr(torch, dtype)).to(place)


@on_devices
def test_gathers(rank, world_size, device):
    group = _communicator(device, rank, world_size)
    for dtype in (*DTYPES, *AS_BYTES):
        own = [_numbers(numel, dtype, group.device, rank) for numel in LENGTHS]
        full = [torch.empty(each.numel() * world_size, dtype=each.dtype, device=group.device) for each in own]
        parts = list(zip(full, own))
        group.all_gather(full, lambda: [group.own_part(a).copy_(b) for a, b in parts]).wait()  # noqa: B023
        for numel, found in zip(LENGTHS, full):
            expected = torch.cat([_numbers(numel, dtype, group.device, each) for each in range(world_size)])
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), dtype


@on_devices
def test_reductions(rank, world_size, device):
    """Also of numbers that are narrower than their sum, and the zeros by which ranks tell what they used."""
    group = _communicator(device, rank, world_size)
    for dtype in DTYPES:
        full = [_numbers(64 * world_size, dtype, group.device, rank) for _ in range(2)]
        full[1].fill_(-0.0)
        wide = torch.float64 if dtype == "float64" else torch.float32
        shards = [torch.empty(64, dtype=wide, device=group.device) for _ in full]
        expected = sum(_numbers(64 * world_size, dtype, group.device, each) for each in range(world_size))
        group.reduce_scatter(shards, full).wait()
        assert torch.equal(shards[0], group.own_part(expected.to(wide))), dtype
        assert torch.signbit(shards[1]).all(), f"-0.0 from every rank, {dtype}"
        for op, total in ((dist.ReduceOp.SUM, expected), (dist.ReduceOp.MAX, None)):
            values = _numbers(64 * world_size, dtype, group.device, rank)
            group.all_reduce([values], op).wait()
            assert total is None or torch.equal(values, total), dtype
            assert values.max() <= world_size


@on_devices
def test_one_to_all_and_all_to_one(rank, world_size, device):
    group = _communicator(device, rank, world_size)
    values = _numbers(12, "float32", group.device, rank)
    group.broadcast(values)
    assert torch.equal(values, _numbers(12, "float32", group.device, 0))
    full = torch.empty(12 * world_size, device=group.device) if rank == 0 else None
    own = torch.full((12,), float(rank), device=group.device)
    group.gather(own, full)
    if rank == 0:
        assert full.tolist() == [float(each) for each in range(world_size) for _ in range(12)]
        full.add_(1)
    group.scatter(own, full)
    assert own.tolist() == [rank + 1.0] * 12
    received = torch.empty(6 * world_size, device=group.device)
    group.all_to_all(received, torch.full((6 * world_size,), float(rank), device=group.device)).wait()
    assert received.tolist() == [float(each) for each in range(world_size) for _ in range(6)]
    lengths = [3 + each for each in range(world_size)]
    parts = torch.empty(sum(lengths), device=group.device)
    group.all_gather_parts(parts, lengths, lambda part: part.fill_(rank)).wait()
    assert parts.tolist() == [float(each) for each, length in enumerate(lengths) for _ in range(length)]
    assert group.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(world_size)]
    assert group.broadcast_object(["from", rank]) == ["from", 0]
    assert group.members == frozenset(range(world_size))


@on_devices
def test_the_host_does_not_wait_for_what_it_issues(rank, world_size, device):
    """Neither when a collective is issued nor when the computation is told to wait for it."""
    group = _communicator(device, rank, world_size)
    full = torch.zeros(1 << 16, device=group.device)
    shard = torch.empty((1 << 16) // world_size, device=group.device)
    for again in range(2):  # at first NCCL may connect
        with no_waiting(group.device if again else torch.device("cpu")):
            group.all_gather([full], lambda: group.own_part(full).fill_(2)).wait()
            group.reduce_scatter([shard], [full.clone()]).wait()
            group.all_reduce([shard]).wait()
    assert shard.tolist()[:2] == [2.0 * world_size**2] * 2
