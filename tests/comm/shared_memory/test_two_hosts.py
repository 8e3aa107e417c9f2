"""Groups over two hosts of two ranks each, simulated: what they compute, and what crosses the link."""

import contextlib
import os
import time
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bed import run_isolated
from bed.hosts import sent_bytes, two_hosts
from bed.patience import NEVER
from collectives import check_gathers_and_sums
from fronts import FULL, HYBRID, shard
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.messages import ExchangeCommunicator
from fsdp_wrap._comm.shared_memory.automatic import AutomaticCommunicator
from fsdp_wrap._comm.shared_memory.rendezvous import ranks_on_each
from fsdp_wrap._comm.shared_memory.two_level import TwoLevelCommunicator
from fsdp_wrap._core import record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

WORLD_SIZE = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as both:
        yield both


def run_on(hosts, tmp_path, body, *args):
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
        timeout=timedelta(seconds=NEVER),
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
    dist.barrier()
    time.sleep(0.2)  # for what that leaves to be acknowledged
    before = sent_bytes()
    dist.barrier()  # nobody sends before all have looked
    collective()
    dist.barrier()
    time.sleep(0.2)
    return sent_bytes() - before


def refused_on_one_host(rank):
    """Then no rank shares memory, and the first of that host tells why."""
    world = Ranks(dist.group.WORLD, rank, WORLD_SIZE)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as told:
        if rank == 3:
            stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=OSError("no such call")))
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


def collectives(rank):
    """Returns how many bytes cross the link, the least of some times: by ours and by gloo's."""
    ours, numel = two_levels(), 1 << 20
    check_gathers_and_sums(ours)
    full, shard = torch.ones(numel), torch.empty(numel // WORLD_SIZE)
    kinds = [
        lambda: ours.all_gather([full], lambda: None).wait(),
        lambda: dist.all_gather_into_tensor(full, ours.own_part(full)),
        lambda: ours.reduce_scatter([shard], [full]).wait(),
        lambda: dist.reduce_scatter_tensor(shard, full),
    ]
    return [min(crossing(kind) for _ in range(3)) for kind in kinds]


def test_collectives_of_which_nothing_crosses_the_link_twice(hosts, tmp_path):
    needed = 4 * (1 << 20) / 2  # what one host has and the other has not, or half of its sum
    for gathered, gathered_plain, reduced, reduced_plain in run_on(hosts, tmp_path, collectives):
        assert needed <= gathered < 1.02 * needed < 0.7 * gathered_plain
        assert needed <= reduced < 1.02 * needed < 0.4 * reduced_plain


WIDTH = 160


def make_net():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def wrapped(front, hybrid, shared_memory):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    options = {"device_mesh": mesh, "sharding_strategy": HYBRID if hybrid else FULL}
    return shard(front, make_net(), ModuleWrapPolicy({nn.Linear}), shared_memory=shared_memory, **options)


def training(rank, front, hybrid):
    """Returns the losses, DDP's, the ways of travelling, and bytes over the link: ours and plain gloo's."""
    os.environ.update(FSDP_WRAP_GLOO="plain", FSDP_WRAP_SHARED_MEMORY="1")
    expected, _, plain = trained(DistributedDataParallel(make_net()))
    losses, ways, ours = trained(wrapped(front, hybrid, True))
    return losses, expected, ways, ours, plain if hybrid else trained(wrapped(front, False, False))[2]


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def run():
        loss = model(torch.randn(5, WIDTH, dtype=torch.float64)).square().mean()
        loss.backward()
        losses.append(loss.item())

    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        with record_events() as events:
            crossed = crossing(run)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {event.way for event in events} - {""}, crossed


@pytest.mark.slow
@pytest.mark.parametrize(("front", "hybrid"), [("flat", True), ("composable", False)])
def test_training_equals_plain_and_crosses_the_link_with_less(hosts, tmp_path, front, hybrid):
    numbers = sum(param.numel() for param in make_net().parameters())
    # A host gets half of the numbers twice and gives half of the sums, or sums its halves with the other's.
    needed = 8 * numbers * (1 if hybrid else 3 / 2)
    way = "shared memory" if hybrid else "shared memory within hosts, messages between them"
    for losses, expected, ways, ours, plain in run_on(hosts, tmp_path, training, front, hybrid):
        torch.testing.assert_close(losses, expected, rtol=1e-7, atol=1e-7)
        assert ways == {way}
        assert ours < 1.1 * needed
        assert ours < 0.7 * plain
