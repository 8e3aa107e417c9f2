"""Groups over two hosts of two ranks each, simulated: what they compute, and what crosses the link."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bed import run_isolated
from bed.hosts import sent_bytes, two_hosts
from fsdp_wrap._communicators import make_communicator
from fsdp_wrap._mesh import Ranks
from fsdp_wrap._two_level import TwoLevelCommunicator

WORLD_SIZE = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as both:
        yield both


def run_on(hosts, tmp_path, body, *args):
    """Calls `body(rank, *args)` on two ranks of each host; returns what they return."""
    outcomes = run_isolated(
        on_host, hosts, str(tmp_path / "store"), body, args, world_size=WORLD_SIZE, backend=None
    )
    assert [outcome.kind for outcome in outcomes] == ["passed"] * WORLD_SIZE, outcomes
    return [outcome.value for outcome in outcomes]


def on_host(rank, world_size, hosts, store, body, args):
    hosts[rank // 2].enter()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    try:
        result = body(rank, *args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def two_levels():
    rank = dist.get_rank()
    first = rank // 2 * 2
    local = dist.new_group([first, first + 1], use_local_synchronization=True)
    within = make_communicator(Ranks(local, rank - first, 2), CPU)
    return TwoLevelCommunicator(Ranks(dist.group.WORLD, rank, WORLD_SIZE), CPU, 1 << 20, within)


def crossing(collective):
    """Returns how many bytes this host sends for a collective, the least of some times."""
    return min(crossing_once(collective) for _ in range(3))


def crossing_once(collective):
    dist.barrier()
    time.sleep(0.2)  # for what that leaves to be acknowledged
    before = sent_bytes()
    dist.barrier()  # nobody sends before all have looked
    collective()
    dist.barrier()
    time.sleep(0.2)
    return sent_bytes() - before


def gathers_and_sums(rank):
    ours = two_levels()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
        full = [torch.zeros(numel).to(dtype) for numel in (8, 40_000, 0)]
        own = [ours.own_part(each) for each in full]
        pending = ours.all_gather(full, lambda own=own: [each.fill_(rank + 1) for each in own])
        for _ in range(2):  # waiting once more has no effect
            pending.wait()
        for each in full:
            assert torch.equal(each.float(), torch.arange(1.0, 5).repeat_interleave(each.numel() // 4))
    for narrow, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        base = [torch.arange(numel).remainder(7) for numel in (8, 40_000, 0)]
        full = [each.add(rank).to(narrow) for each in base]
        expected = [ours.own_part(4 * each + 6).to(dtype) for each in base]
        shards = [torch.empty_like(each) for each in expected]
        ours.reduce_scatter(shards, full).wait()
        assert all(torch.equal(*pair) for pair in zip(shards, expected))


def test_gathers_and_sums(hosts, tmp_path):
    run_on(hosts, tmp_path, gathers_and_sums)


def link_bytes(rank):
    ours, numel = two_levels(), 1 << 20
    full, shard = torch.ones(numel), torch.empty(numel // WORLD_SIZE)
    return [
        crossing(lambda: ours.all_gather([full], lambda: None).wait()),
        crossing(lambda: dist.all_gather_into_tensor(full, ours.own_part(full))),
        crossing(lambda: ours.reduce_scatter([shard], [full]).wait()),
        crossing(lambda: dist.reduce_scatter_tensor(shard, full)),
    ]


def test_nothing_crosses_the_link_twice(hosts, tmp_path):
    needed = 4 * (1 << 20) / 2  # what one host has and the other has not, or half of its sum
    for gathered, gathered_plain, reduced, reduced_plain in run_on(hosts, tmp_path, link_bytes):
        assert needed <= gathered < 1.02 * needed < 0.7 * gathered_plain
        assert needed <= reduced < 1.02 * needed < 0.4 * reduced_plain
