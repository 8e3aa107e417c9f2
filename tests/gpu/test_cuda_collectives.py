"""Collectives over NCCL: how a process group is asked, and the watch over them, which asks events."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bed import ranks
from bed.patience import until
from fronts import either_front
from fsdp_wrap._comm import Ranks, positions_of
from fsdp_wrap._comm import device as _device
from fsdp_wrap._comm.process_group import GroupCommunicator
from fsdp_wrap._comm.watching import monitor, watch
from on_cuda import SIZES, on_devices, only_cuda, place_of
from stream_programs import batch, wrapped

DTYPES = ["float64", "float32", "bfloat16", "float16"]


def _communicator(device, rank, world_size):
    return GroupCommunicator(Ranks(dist.group.WORLD, rank, world_size), place_of(device, rank))


def _numbers(numel, dtype, place, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (numel,), generator=generator).to(getattr(torch, dtype)).to(place)


@on_devices
def test_reductions(rank, world_size, device):
    """Also of numbers that are narrower than their sum, and the zeros by which ranks tell what they used."""
    group = _communicator(device, rank, world_size)
    for dtype in DTYPES:
        full = [_numbers(64 * world_size, dtype, group.device, rank) for _ in range(2)]
        full[1].fill_(-0.0)
        wide = torch.float64 if dtype == "float64" else torch.float32
        shards = [torch.empty(64, dtype=wide, device=group.device) for _ in full]
        expected = sum(_numbers(64 * world_size, dtype, group.device, other) for other in range(world_size))
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
        assert full.tolist() == [float(other) for other in range(world_size) for _ in range(12)]
        full.add_(1)
    group.scatter(own, full)
    assert own.tolist() == [rank + 1.0] * 12
    received = torch.empty(6 * world_size, device=group.device)
    group.all_to_all(received, torch.full((6 * world_size,), float(rank), device=group.device)).wait()
    assert received.tolist() == [float(other) for other in range(world_size) for _ in range(6)]
    lengths = [3 + other for other in range(world_size)]
    parts = torch.empty(sum(lengths), device=group.device)
    group.all_gather_parts(parts, lengths, lambda part: part.fill_(rank)).wait()
    assert parts.tolist() == [float(other) for other, length in enumerate(lengths) for _ in range(length)]
    assert group.all_gather_object({"rank": rank}) == [{"rank": other} for other in range(world_size)]
    assert group.broadcast_object(["from", rank]) == ["from", 0]
    assert group.members == frozenset(range(world_size))


LIMIT = timedelta(seconds=2)


def here():
    return positions_of(dist.group.WORLD)


@contextmanager
def watched(pace):
    """Asks events at a pace; yields the warnings."""
    patches = [
        mock.patch.object(monitor, "_PACE", pace),
        mock.patch.object(watch, "time_limit", lambda *_: LIMIT),
    ]
    with patches[0], patches[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@only_cuda
@ranks(1, backend="nccl")
def test_what_a_stream_has_not_done_is_reported_and_what_it_does_then_is_not(rank, world_size):
    """Also while another thread, this one, captures a graph."""
    device = place_of("cuda", rank)
    accelerator = _device.accelerator_of(device)
    assert accelerator is not None
    made = monitor.monitor_of(accelerator)
    look = watch.Watch(dist.group.WORLD, device, here())
    with watched(0.01) as caught:
        torch.cuda._sleep(int(6e9))  # some seconds, by the clock of any GPU
        event = torch.cuda.current_stream().record_event()
        made.note(event, "gather", look)
        until(lambda: here().verdict)
        torch.cuda.synchronize()
        until(lambda: here().verdict is None)
    assert any("has not completed" in str(warning.message) for warning in caught)
    values = torch.ones(8, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with mock.patch.object(monitor, "_PACE", 0.001):
        torch.cuda._sleep(int(1e8))
        for _ in range(100):
            made.note(torch.cuda.current_stream().record_event(), "gather", look)
        with torch.cuda.graph(graph):  # which synchronises first: the events are asked meanwhile
            assert accelerator.captures
            for _ in range(200):
                values.add_(1)
                made.note(event, "gather", look)
                time.sleep(0.001)
    graph.replay()
    torch.cuda.synchronize()
    assert values.tolist() == [201.0] * 8 and not accelerator.captures


@only_cuda
@pytest.mark.skipif(2 not in SIZES, reason="needs two GPUs")
@either_front
@ranks(2, backend="nccl")
def test_a_rank_that_comes_late_is_reported_by_unit(rank, world_size, front):
    device = place_of("cuda", rank)
    model = wrapped(front, device_id=device) if front != "composable" else wrapped(front)
    for step in range(2):
        model(batch(rank, step).to(device)).square().sum().backward()
    dist.barrier()
    torch.cuda.synchronize()
    with watched(0.05) as caught:
        if rank == 1:
            time.sleep(1.2)  # more than the patience, less than the limit and its margin
        model(batch(rank, 2).to(device)).sum().item()
    late = [str(warning.message) for warning in caught if "time limit" in str(warning.message)]
    assert len(late) == 1 - rank, late
    if rank == 0:
        assert "gathers" in late[0] and "rank 1 (alive)" in late[0]
    assert here().verdict is None
