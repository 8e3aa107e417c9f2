"""The same numbers as training without sharding, by each strategy: bit-equal to DDP, or near in float64.

Also beside torch's other ways to parallelise a model: `replicate()` and DDP, around units and inside.
"""

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.memory import live_bytes, only_new_objects
from bed.references import count_collectives
from fronts import (
    FULL,
    KEPT,
    assert_same_grads,
    assert_same_values,
    assert_tensors,
    each_front,
    full_grads,
    full_state,
    prefetching,
    shard,
    twins,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import CustomPolicy
from models import WRAPPINGS, Block, Transformer, loss_of, named_state, tokens, train, transformer_twins
from nets import stack

STEPS = 10
WRAPPED = [("flat", "whole"), ("flat", "size"), ("orig", "block"), ("orig", "name"), ("composable", "size")]
NO_SHARD = ShardingStrategy.NO_SHARD
OPTIONS = [
    *itertools.product(("flat", "orig"), ("block",), (None, "BACKWARD_PRE", "BACKWARD_POST"), (FULL, KEPT)),
    *(("flat", "block", None, NO_SHARD), ("orig", "block", "BACKWARD_PRE", NO_SHARD)),
    *(("composable", "block", "default", FULL), ("composable", "block", "default", KEPT)),
    *((*wrapping, "default", FULL) for wrapping in WRAPPED),
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_with_accumulation(module: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    with module.no_sync():
        loss_of(module, tokens(rank, 9)).backward()
    loss_of(module, tokens(rank, 8)).backward()
    optimizer.step()
    train(module, optimizer, rank, range(4))


def assert_trains_like_ddp(model: nn.Module, ddp: DDP, rank: int, steps: int) -> None:
    ours, theirs = (train(net, adamw(net), rank, range(steps)) for net in (model, ddp))
    assert ours == theirs
    assert_same_values(model, ddp)
    assert_same_grads(model, ddp)


@pytest.mark.parametrize(("front", "wrapping"), WRAPPED)
@ranks(1, 3, 4)
def test_float64_training_equals_ddp(rank, world_size, front, wrapping):
    policy = WRAPPINGS[wrapping]()
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=policy)
    ddp = DDP(plain)
    for net in (ddp, wrapped):
        train(net, torch.optim.AdamW(net.parameters(), lr=1e-2), rank, range(STEPS))
    state, grads = full_state(wrapped), full_grads(wrapped)
    for name, param in named_state(ddp):
        if name.endswith("attention.in_proj_bias"):
            continue  # the key's part has a true gradient of zero, whose sign AdamW blows up
        torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[name], param.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("front", "wrapping", "prefetch", "strategy"), OPTIONS)
@ranks(2)
def test_strategies_wrappings_and_prefetch_change_no_bit(
    rank, world_size, front, wrapping, prefetch, strategy
):
    options = {"sharding_strategy": strategy, **prefetching(prefetch)}
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS[wrapping](), **options)
    assert_trains_like_ddp(wrapped, DDP(plain), rank, STEPS if prefetch == "default" else 3)


@ranks(2)
def test_no_shard_keeps_one_copy_and_shapes(rank, world_size):
    with only_new_objects():  # not what tests before have left in this process
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        shapes = [param.shape for param in module.parameters()]
        size = sum(param.nbytes for param in module.parameters())
        model = FSDP(module, sharding_strategy=NO_SHARD, use_orig_params=True)
        with count_collectives() as traffic:
            model(torch.ones(1, 256)).sum().backward()
        assert {name: calls for name, (calls, _) in traffic.items()} == {"all_reduce": 1}
        assert [param.shape for param in model.parameters()] == shapes
        assert [param.grad.shape for param in model.parameters()] == shapes
        assert live_bytes() <= 2 * size + 64 * 1024  # parameters and gradients


def hybrid_arguments(form: str) -> dict[str, Any]:
    if form == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    if form == "local_world_size":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        return {}
    members = ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    shards, copies = ([dist.new_group(ranks) for ranks in lists] for lists in members)
    return {"process_group": (shards[dist.get_rank() // 2], copies[dist.get_rank() % 2])}


@pytest.mark.parametrize(
    ("use_orig_params", "strategy", "form"),
    [
        (False, "HYBRID_SHARD", "mesh"),
        (True, "_HYBRID_SHARD_ZERO2", "mesh"),
        (True, "HYBRID_SHARD", "pair"),
        (False, "_HYBRID_SHARD_ZERO2", "local_world_size"),
    ],
)
@ranks(4)
def test_hybrid_equals_ddp(rank, world_size, use_orig_params, strategy, form):
    plain, model = transformer_twins(use_orig_params, strategy, **hybrid_arguments(form))
    ddp = DDP(plain)
    for net in (ddp, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        train_with_accumulation(net, optimizer, rank)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), norm, rtol=1e-10, atol=1e-12)
    assert_same_values(model, ddp, rtol=0, atol=1e-10)
    assert_same_grads(model, ddp, rtol=0, atol=1e-10)
    local, whole = (sum(param.numel() for param in net.parameters()) for net in (model, plain))
    assert abs(local - whole / 2) <= 200  # one half each, but for alignment


@ranks(2)
def test_strategies_differ_per_unit(rank, world_size):
    chosen = iter([NO_SHARD, KEPT, FULL])

    def choose(module: nn.Module) -> Any:
        return isinstance(module, Block) and {"sharding_strategy": next(chosen)}

    plain, model = twins("orig", Transformer, auto_wrap_policy=CustomPolicy(choose))
    ddp = DDP(plain)
    assert_trains_like_ddp(model, ddp, rank, steps=4)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    torch.testing.assert_close(model.clip_grad_norm_(0.01), norm)


@ranks(2)
def test_hosts_must_hold_equally_many_ranks(rank, world_size):
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=3 does not divide the 2 ranks"):
        FSDP(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


RANKS = 2


def train_by(model: Callable[..., Any], batches: Any, optimizer: torch.optim.Optimizer) -> None:
    """Trains by some batches a step, of which the model gets the mean gradient."""
    for several in batches:
        loss = sum(model(batch).square().sum() for batch in several) / len(several)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_trains_like_plain(plain: nn.Module, model: nn.Module, rank: int, around: Any = None) -> None:
    """Compares training with that of a plain model that sees all ranks' batches, in float64."""
    batches = torch.randn(3, RANKS, 5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_by(around or model, batches[:, rank : rank + 1], optimizer)
    train_by(plain, batches, torch.optim.AdamW(plain.parameters(), lr=0.1))
    with torch.no_grad():
        expected, output = plain(batches[0, 0]), model(batches[0, 0])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def replicated_by(way: str, module: nn.Module) -> None:
    if way == "ddp":
        replicate(module)
    else:
        replicate_by_fsdp(module, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replicate",)))


@each_front
@ranks(RANKS)
def test_replicate_around_units_and_inside_of_one_and_ddp_around(rank, world_size, front):
    for way in ("ddp", "fsdp"):
        plain, inside = stack(4, 6, 6, 3), stack(4, 6, 6, 3)
        model = copy.deepcopy(plain)
        for index in (0, 2):
            model[index] = shard(front, model[index])
        replicated_by(way, model)
        assert_trains_like_plain(plain, model, rank)

        replicated_by(way, inside[2])
        theirs = [*inside[2].parameters()]
        around: Any = shard(front, inside)
        assert all(one is other for one, other in zip(theirs, around[2].parameters())), "left alone"
        assert_trains_like_plain(stack(4, 6, 6, 3), around, rank)

    model = stack(4, 6, 6, 3)
    model[2] = shard(front, model[2])
    names = [name for name, _ in model.named_parameters() if name.startswith("2.")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    assert_trains_like_plain(stack(4, 6, 6, 3), model, rank, DDP(model))
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(shard("composable", stack(4, 6, 6, 3)))


@each_front
@ranks(RANKS)
def test_channels_last(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 3, 1, bias=False)).double()
    model = shard(front, copy.deepcopy(plain).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images = torch.randn(3, RANKS, 2, 4, 5, 5, dtype=torch.double)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mine = images[:, rank : rank + 1].to(copy=True)
    train_by(lambda batch: model(batch.to(memory_format=torch.channels_last)), mine, optimizer)
    train_by(plain, images, torch.optim.AdamW(plain.parameters(), lr=0.1))
    assert_tensors(plain.state_dict(), full_state(model), rtol=1e-12, atol=1e-12)
