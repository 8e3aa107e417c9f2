"""Units beside torch's other ways to parallelise a model: `replicate()` and DDP, around and inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fronts import each_front, shard

RANKS = 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()


def losses(model: Callable[..., Any], batches: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Trains by some batches a step, of which the model gets the mean gradient."""
    found = []
    for several in batches:
        loss = sum(model(batch).square().sum() for batch in several) / len(several)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_trains_like(plain: nn.Module, model: nn.Module, rank: int, around: Any = None) -> None:
    """Compares training with that of a plain model that sees all ranks' batches, in float64."""
    batches = torch.randn(3, RANKS, 5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses(around or model, batches[:, rank : rank + 1], optimizer)
    losses(plain, batches, torch.optim.AdamW(plain.parameters(), lr=0.1))
    with torch.no_grad():
        expected, found = plain(batches[0, 0]), model(batches[0, 0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def replicated_by(way: str, module: nn.Module) -> None:
    if way == "ddp":
        replicate(module)
    else:
        replicate_by_fsdp(module, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replicate",)))


@each_front
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@ranks(RANKS)
def test_replicate_around_units(rank, world_size, way, front):
    plain = net()
    model = copy.deepcopy(plain)
    for index in (0, 2):
        model[index] = shard(front, model[index])
    replicated_by(way, model)
    assert_trains_like(plain, model, rank)


@each_front
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@ranks(RANKS)
def test_replicate_inside_of_a_unit(rank, world_size, way, front):
    plain = net()
    model = copy.deepcopy(plain)
    replicated_by(way, model[2])
    theirs = [*model[2].parameters()]
    model = shard(front, model)
    assert all(one is other for one, other in zip(theirs, model[2].parameters())), "left alone"
    assert_trains_like(plain, model, rank)


@each_front
@ranks(RANKS)
def test_ddp_around_units_that_it_ignores(rank, world_size, front):
    plain = net()
    model = copy.deepcopy(plain)
    model[2] = shard(front, model[2])
    names = [name for name, _ in model.named_parameters() if name.startswith("2.")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    assert_trains_like(plain, model, rank, DDP(model))


@ranks(RANKS)
def test_what_is_sharded_is_not_replicated(rank, world_size):
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(shard("composable", net()))
