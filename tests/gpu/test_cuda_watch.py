"""The watch over collectives on CUDA: a thread that asks events. Skipped where there is no GPU."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bed import ranks
from bed.patience import until
from fsdp_wrap._comm import device as _device
from fsdp_wrap._comm import positions
from fsdp_wrap._comm.watching import monitor, watch
from on_cuda import SIZES, needs_cuda, place_of
from stream_programs import batch, wrapped

pytestmark = needs_cuda

LIMIT = timedelta(seconds=2)


def here():
    return positions.positions_of(dist.group.WORLD)


@ranks(1, backend="nccl")
def test_what_a_stream_has_not_done_is_reported_and_what_it_does_then_is_not(rank, world_size):
    """Also while another thread, this one, captures a graph."""
    device = place_of("cuda", rank)
    accelerator = _device.accelerator_of(device)
    assert accelerator is not None
    made = monitor.monitor_of(accelerator)
    look = watch.Watch(dist.group.WORLD, device, here())
    patches = [
        mock.patch.object(monitor, "_PACE", 0.01),
        mock.patch.object(watch, "time_limit", lambda *_: LIMIT),
    ]
    with patches[0], patches[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda._sleep(int(6e9))  # some seconds, by the clock of any GPU
        event = torch.cuda.current_stream().record_event()
        made.note(event, "gather", look)
        until(lambda: here().verdict)
        torch.cuda.synchronize()
        until(lambda: here().verdict is None)
    assert any("has not completed" in str(each.message) for each in caught)
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


@pytest.mark.skipif(2 not in SIZES, reason="needs two GPUs")
@pytest.mark.parametrize("front", ["orig", "composable"])
@ranks(2, backend="nccl")
def test_a_rank_that_comes_late_is_reported_by_unit(rank, world_size, front):
    device = place_of("cuda", rank)
    model = wrapped(front, device_id=device) if front != "composable" else wrapped(front)
    for step in range(2):
        model(batch(rank, step).to(device)).square().sum().backward()
    dist.barrier()
    torch.cuda.synchronize()
    patches = [
        mock.patch.object(monitor, "_PACE", 0.05),
        mock.patch.object(watch, "time_limit", lambda *_: LIMIT),
    ]
    with patches[0], patches[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(1.2)  # more than the patience, less than the limit and its margin
        model(batch(rank, 2).to(device)).sum().item()
    late = [str(each.message) for each in caught if "time limit" in str(each.message)]
    assert len(late) == 1 - rank, late
    if rank == 0:
        assert "gathers" in late[0] and "rank 1 (alive)" in late[0]
    assert here().verdict is None
