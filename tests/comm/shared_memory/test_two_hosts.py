"""Groups over two hosts of two ranks each, simulated: what they compute, and what crosses the link."""

from __future__ import annotations

import contextlib
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
from torch.nn.parallel import DistributedDataParallel

from bed import run_isolated
from bed.hosts import sent_bytes, two_hosts
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
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


@pytest.mark.parametrize(
    ("by_rank", "are_blocks"),
    [
        ("aa", True),
        ("aabb", True),
        ("bbbaaa", True),
        ("ab", False),
        ("abab", False),
        ("abba", False),
        ("aaab", False),
    ],
)
def test_two_levels_need_blocks_of_several_ranks(by_rank, are_blocks):
    assert bool(ranks_on_each(by_rank)) is are_blocks


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


def test_gathers_and_sums(hosts, tmp_path):
    run_on(hosts, tmp_path, gathers_and_sums)


def waits_in_other_orders(rank):
    """Collectives issued in one order complete, whatever a rank waits for first."""
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


def test_waits_in_other_orders(hosts, tmp_path):
    run_on(hosts, tmp_path, waits_in_other_orders)


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


WIDTH, STEPS = 160, 3


def make_net():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def batch(step, rank):
    torch.manual_seed(10 * step + rank)
    return torch.randn(5, WIDTH, dtype=torch.float64)


def expected_losses():
    """Losses of a plain model that sees the batches of all ranks, by step and rank."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        of_ranks = [net(batch(step, rank)).square().mean() for rank in range(WORLD_SIZE)]
        optimizer.zero_grad()
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        losses.append([loss.item() for loss in of_ranks])
    return losses


def by_wrapper(net, hybrid, shared_memory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    strategy = ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD
    policy = ModuleWrapPolicy({nn.Linear})
    return FSDP(net, None, strategy, None, policy, device_mesh=mesh, shared_memory=shared_memory)


def by_fully_shard(net, hybrid, shared_memory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    for module in (*net, net):
        fully_shard(module, mesh=mesh, shared_memory=shared_memory)
    return net


def training(rank, wrap, hybrid):
    """Returns the losses, the ways of travelling, and a step's bytes over the link: ours and plain gloo's."""
    os.environ.update(FSDP_WRAP_GLOO="plain", FSDP_WRAP_SHARED_MEMORY="1")
    *_, plain = trained(DistributedDataParallel(make_net()) if hybrid else wrap(make_net(), False, False))
    return *trained(wrap(make_net(), hybrid, True)), plain


def trained(model):
    """Returns the losses, the ways of travelling, and how many bytes this host sends in the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, crossed = [], 0

    def run(step):
        loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        losses.append(loss.item())

    for step in range(STEPS):
        with record_events() as events:
            crossed = crossing_once(partial(run, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {event.way for event in events} - {""}, crossed


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [False, True], ids=["full", "hybrid"])
@pytest.mark.parametrize("wrap", [by_wrapper, by_fully_shard], ids=["wrapper", "fully_shard"])
def test_training_equals_plain_and_crosses_the_link_with_less(hosts, tmp_path, wrap, hybrid):
    expected = torch.tensor(expected_losses(), dtype=torch.float64)
    numbers = sum(param.numel() for param in make_net().parameters())
    # A host gets half of the numbers twice and gives half of the sums, or sums its halves with the other's.
    needed = 8 * numbers * (1 if hybrid else 3 / 2)
    way = "shared memory" if hybrid else "shared memory within hosts, messages between them"
    for rank, (losses, ways, ours, plain) in enumerate(run_on(hosts, tmp_path, training, wrap, hybrid)):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), expected[:, rank])
        assert ways == {way}
        assert ours < 1.1 * needed
        assert ours < 0.7 * plain
