"""Bytes that ranks hold and receive with one state for all copies, and when gathers cross the replicas."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_wrap
from bed import ranks
from bed.memory import live_bytes, only_new_objects
from copies import adamw, in_copies, received, transformer
from fronts import FRONTS, each_front, no_sync
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import loss_of, tokens

WIDTH, LAYERS = 256, 4
NUMEL = WIDTH * WIDTH * LAYERS
PLAIN = {"FSDP_WRAP_GLOO": "plain", "FSDP_WRAP_SHARED_MEMORY": "0"}


def squares(front: str, way: str, bf16: bool) -> Any:
    """Shards square matrices, each a unit, on 2 x 2 ranks: "full", "hybrid", or "one" state in copies."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh(
        "cpu", (4,) if way == "full" else (2, 2), mesh_dim_names=("a", "b")[: 1 + (way != "full")]
    )
    options: dict[str, Any] = {"state_over_replicas": way == "one"}
    if front == "composable":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    strategy = ShardingStrategy.FULL_SHARD if way == "full" else ShardingStrategy.HYBRID_SHARD
    options["mixed_precision"] = MixedPrecision(torch.bfloat16 if bf16 else None, torch.float32)
    return FSDP(
        model,
        device_mesh=mesh,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=front == "orig",
        **options,
    )


each_form_and_dtype = pytest.mark.parametrize(
    ("front", "bf16"),
    [
        pytest.param(front, bf16, marks=() if bf16 == (front == "composable") else pytest.mark.slow)
        for front in FRONTS
        for bf16 in (False, True)
    ],
)


def trained(model: Any, steps: int = 2) -> Any:
    """Trains; returns the optimizer, whose gradients are gone."""
    optimizer = adamw(model)
    for _ in range(steps):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@each_form_and_dtype
@ranks(4)
def test_bytes_at_rest(rank, world_size, front, bf16):
    """Of 12 for each parameter, Adam's state included: a half in copies, a quarter over all ranks."""
    held = {}
    for way in ("full", "hybrid", "one"):
        with only_new_objects():
            before = live_bytes()
            model = squares(front, way, bf16)
            optimizer = trained(model)
            held[way] = (live_bytes() - before) / NUMEL
        assert optimizer.state
        del model, optimizer
    assert held["hybrid"] == pytest.approx(12 / 2, rel=0.01)
    assert held["full"] == pytest.approx(12 / 4, rel=0.01)
    assert held["one"] == pytest.approx(12 / 4 + (2 if bf16 else 4) / 2, rel=0.01)


def by_ranks(counts: Counter[tuple[str, tuple[int, ...]]]) -> dict[tuple[str, int], float]:
    """Returns the received bytes for each parameter, by collective and number of ranks apart."""
    received: dict[tuple[str, int], float] = {}
    for (kind, members), nbytes in counts.items():
        key = kind, members[1] - members[0] if len(members) == 2 else 4
        received[key] = received.get(key, 0) + nbytes / NUMEL
    return received


@each_form_and_dtype
@ranks(4)
def test_bytes_received_in_a_step(rank, world_size, front, bf16):
    """Neighbours make a copy. Ranks two apart are counterparts: less crosses their link than with copies."""
    size, by_way = (2 if bf16 else 4), {}
    with mock.patch.dict(os.environ, PLAIN):
        for way in ("full", "hybrid", "one"):
            model = squares(front, way, bf16)
            optimizer = trained(model)
            with received() as counts:
                model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            by_way[way] = by_ranks(counts)
    within = {("allgather_base", 1): 2 * size / 2, ("reduce_scatter_base", 1): 4 / 2}
    expected = {
        "full": {("allgather_base", 4): 2 * size * 3 / 4, ("reduce_scatter_base", 4): 4 * 3 / 4},
        "hybrid": {**within, ("allreduce", 2): 2 * 4 / 2 / 2},
        "one": {**within, ("allgather_base", 2): size / 2 / 2, ("reduce_scatter_base", 2): 4 / 2 / 2},
    }
    assert by_way == {way: pytest.approx(counts, rel=0.01) for way, counts in expected.items()}


def crossings(body: Any) -> int:
    """Counts the gathers over the replicas, here of ranks two apart, that a function issues."""
    with received() as counts:
        body()
    kinds = {kind for kind, members in counts if members[1] - members[0] == 2}
    return kinds & {"allgather_base"} != set()


@each_front
@ranks(4)
def test_gathers_cross_the_replicas_when_the_state_may_have_changed(rank, world_size, front):
    with mock.patch.dict(os.environ, PLAIN):
        model = in_copies(front, transformer())
    optimizer = adamw(model)

    def forward() -> torch.Tensor:
        return loss_of(model, tokens(rank, 0))

    def writes() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        forward()

    assert crossings(lambda: forward().backward())
    assert not crossings(forward)
    with no_sync(model):
        assert not crossings(lambda: forward().backward())
    assert not crossings(lambda: forward().backward())
    optimizer.step()
    assert crossings(forward) and not crossings(forward)
    assert crossings(writes) and not crossings(forward)
    model.load_state_dict(model.state_dict())
    assert crossings(forward) and not crossings(forward)
    for param in model.parameters():
        param.requires_grad_(False)
    forward()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).step()
    assert not crossings(forward), "what is frozen stays, whatever is stepped"


def test_a_plan_knows_both_links():
    """512 ranks in copies of 32: bytes at rest and received."""
    plans = {way: fsdp_wrap.plan(partial(planned, way), 512, device="cuda") for way in ("hybrid", "one")}
    assert plans["hybrid"].rest_bytes == pytest.approx(12 * PLANNED / 32, rel=0.01)
    assert plans["one"].rest_bytes == pytest.approx(12 * PLANNED / 512 + 2 * PLANNED / 32, rel=0.01)
    gathers, sums = (plans["one"].wire_bytes[kind] for kind in ("all_gather", "reduce_scatter"))
    assert gathers == pytest.approx(PLANNED * (2 * 2 * 31 / 32 + 2 / 32 * 15 / 16), rel=0.01)
    assert sums == pytest.approx(PLANNED * (4 * 31 / 32 + 4 / 32 * 15 / 16), rel=0.01)
    assert "all_reduce" in plans["hybrid"].wire_bytes and "all_reduce" not in plans["one"].wire_bytes


PLANNED = 3 * 4096**2


def planned(way: str) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))
    mesh = init_device_mesh("cuda", (16, 32), mesh_dim_names=("copies", "shards"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, state_over_replicas=way == "one")
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
