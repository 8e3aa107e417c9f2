"""Training over two hosts of two ranks each, simulated: what is computed, and what crosses the link."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from bed import run_isolated
from bed.hosts import sent_bytes, two_hosts
from bed.patience import NEVER
from fronts import FULL, HYBRID, shard
from fsdp_wrap._core import record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

WORLD_SIZE = 4


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


def crossing(collective):
    dist.barrier()
    time.sleep(0.2)  # for what that leaves to be acknowledged
    before = sent_bytes()
    dist.barrier()  # nobody sends before all have looked
    collective()
    dist.barrier()
    time.sleep(0.2)
    return sent_bytes() - before


WIDTH = 160


def make_net():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()


def wrapped(front, hybrid):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    options = {"device_mesh": mesh, "sharding_strategy": HYBRID if hybrid else FULL}
    return shard(front, make_net(), ModuleWrapPolicy({nn.Linear}), **options)


def training(rank, front, hybrid):
    """Returns the losses, DDP's, the ways of travelling, and bytes over the link: ours and DDP's."""
    os.environ.update(FSDP_WRAP_GLOO="plain", FSDP_WRAP_SHARED_MEMORY="1")
    expected, _, plain = trained(DistributedDataParallel(make_net()))
    losses, ways, ours = trained(wrapped(front, hybrid))
    return losses, expected, ways, ours, plain


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
@pytest.mark.parametrize(("front", "hybrid"), [("flat", True), ("composable", True), ("composable", False)])
def test_training_over_two_hosts_equals_plain(hosts, tmp_path, front, hybrid):
    """Copies of one host share memory and send over the link what DDP does; shards of both hosts use gloo."""
    numbers = sum(param.numel() for param in make_net().parameters())
    for losses, expected, ways, ours, plain in run_on(hosts, tmp_path, training, front, hybrid):
        torch.testing.assert_close(losses, expected, rtol=1e-7, atol=1e-7)
        assert ways == ({"shared memory"} if hybrid else set())
        # A host sums its halves with the other's.
        assert not hybrid or ours < min(1.1 * 8 * numbers, 0.7 * plain)
