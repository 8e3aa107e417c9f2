"""Groups over two hosts of two ranks each, simulated: what they compute, and what crosses the link."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import time
import warnings
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import run_isolated
from bed.hosts import sent_bytes, two_hosts
from fronts import assert_same_grads, twins
from fsdp_wrap import ShardingStrategy
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.messages import ExchangeCommunicator
from fsdp_wrap._comm.shared_memory import memory as _shared_memory
from fsdp_wrap._comm.shared_memory.automatic import AutomaticCommunicator
from fsdp_wrap._comm.shared_memory.rendezvous import ranks_on_each
from fsdp_wrap._comm.shared_memory.two_level import TwoLevelCommunicator
from fsdp_wrap._core.events import record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

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


def test_two_levels_need_blocks_of_several_ranks():
    for by_rank in ("aa", "aabb", "bbbaaa"):
        assert ranks_on_each(by_rank), by_rank
    for by_rank in ("ab", "abab", "abba", "aaab"):
        assert not ranks_on_each(by_rank), by_rank


def two_levels():
    best = AutomaticCommunicator(Ranks(dist.group.WORLD, dist.get_rank(), WORLD_SIZE), CPU, 1 << 20)._best
    assert isinstance(best, TwoLevelCommunicator)
    return best


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


def waits_in_other_orders(rank):
    """What is issued alike completes alike, whatever a rank waits for first."""
    ours = two_levels()
    for numel in (4, 30_000):
        issued = []
        for number in range(6):
            full, summed = torch.zeros(4 * numel), torch.full((4 * numel,), float(number * rank))
            own, shard = ours.own_part(full), torch.empty(numel)
            issued.append((ours.all_gather([full], partial(own.fill_, number + rank)), full))
            issued.append((ours.reduce_scatter([shard], [summed]), shard))
        random.Random(rank).shuffle(order := list(range(len(issued))))
        for index in order:
            issued[index][0].wait()
        for number, ((_, full), (_, shard)) in enumerate(zip(issued[::2], issued[1::2])):
            assert torch.equal(full, torch.arange(4.0).add(number).repeat_interleave(numel))
            assert (shard == 6 * number).all()


@pytest.mark.parametrize("body", [gathers_and_sums, waits_in_other_orders])
def test_gathers_and_sums(hosts, tmp_path, body):
    run_on(hosts, tmp_path, body)


def refused_on_one_host(rank):
    """Then no rank shares memory, and the first of that host tells why."""
    refused = mock.patch.object(os, "memfd_create", side_effect=OSError("no such call"))
    fresh = mock.patch.dict(_shared_memory._own, clear=True)
    world = Ranks(dist.group.WORLD, rank, WORLD_SIZE)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as told:
        for patch in (fresh, refused) if rank == 3 else ():
            stack.enter_context(patch)
        warnings.simplefilter("always")
        best = AutomaticCommunicator(world, CPU, 1 << 20)._best
    total = torch.full((8,), float(rank))
    best.all_reduce([total]).wait()
    assert type(best) is ExchangeCommunicator and (total == 6).all()
    return [str(warning.message) for warning in told]


def test_no_rank_shares_memory_where_one_host_refuses(hosts, tmp_path):
    told = run_on(hosts, tmp_path, refused_on_one_host)
    assert [len(each) for each in told] == [0, 0, 1, 0]
    assert "rank 3: OSError: no such call" in told[2][0]


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


def training(rank, front, hybrid):
    """Returns the ways of travelling, and a step's bytes over the link with the numbers of the model."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "1"
    options = {"shared_memory": True, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    if hybrid:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layers = [nn.Linear(160, 160), nn.Tanh()] * 4
    plain, model = twins(front, lambda: nn.Sequential(*copy.deepcopy(layers)), torch.float64, **options)
    crossed = []
    for step in range(3):
        batches = torch.randn(WORLD_SIZE, 5, 160, generator=torch.Generator().manual_seed(step)).double()
        with record_events() as events:
            crossed.append(crossing_once(lambda x=batches[rank]: model(x).square().mean().backward()))
        torch.stack([plain(x).square().mean() for x in batches]).mean().backward()  # on, as does the model's
        assert_same_grads(model, plain, rtol=1e-10, atol=1e-13)
    return {event.way for event in events} - {""}, crossed[-1], sum(map(torch.numel, plain.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(("front", "hybrid"), [("orig", True), ("composable", False), ("flat", False)])
def test_training_equals_plain_and_crosses_the_link_with_less(hosts, tmp_path, front, hybrid):
    # A host gets half of the numbers twice and gives half of the sums, or sums its halves with the other's.
    way = "shared memory" if hybrid else "shared memory within hosts, messages between them"
    for ways, crossed, numbers in run_on(hosts, tmp_path, training, front, hybrid):
        assert ways == {way}
        assert crossed < 1.1 * 8 * numbers * (1 if hybrid else 3 / 2)
