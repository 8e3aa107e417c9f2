"""The same numbers as training without sharding: bit-equal to DDP, or to a plain model in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fronts import (
    assert_same_grads,
    assert_same_values,
    each_form,
    each_front,
    each_prefetch,
    full_grads,
    full_state,
    prefetching,
    shard,
    twins,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import always_wrap_policy
from models import WRAPPINGS, Transformer, gather_objects, loss_of, named_state, tokens, train

STEPS = 10
each_wrapping = pytest.mark.parametrize(
    ("front", "wrapping"),
    [(front, wrapping) for front in ("flat", "orig") for wrapping in WRAPPINGS] + [("composable", "size")],
)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@each_wrapping
@ranks(2)
def test_fp32_training_is_bit_equal_to_ddp(rank, world_size, front, wrapping):
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS[wrapping]())
    ddp = DDP(plain)
    references, ours = _adamw(ddp), _adamw(wrapped)
    assert train(wrapped, ours, rank, range(STEPS)) == train(ddp, references, rank, range(STEPS))
    assert_same_values(wrapped, ddp)
    assert_same_grads(wrapped, ddp)


@each_wrapping
@ranks(1, 3, 4)
def test_float64_training_equals_ddp(rank, world_size, front, wrapping):
    policy = WRAPPINGS[wrapping]()
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=policy)
    ddp = DDP(plain)
    train(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), rank, range(STEPS))
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2), rank, range(STEPS))
    state, grads = full_state(wrapped), full_grads(wrapped)
    for name, param in named_state(ddp):
        if name.endswith("attention.in_proj_bias"):
            continue  # the key's part has a true gradient of zero, whose sign AdamW blows up
        torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[name], param.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@each_prefetch
@ranks(2)
def test_strategy_and_prefetch_change_no_bit(rank, world_size, front, prefetch, strategy):
    options = {"sharding_strategy": ShardingStrategy[strategy], **prefetching(prefetch)}
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"](), **options)
    ddp = DDP(plain)
    train(ddp, _adamw(ddp), rank, range(3))
    train(wrapped, _adamw(wrapped), rank, range(3))
    assert_same_values(wrapped, ddp)


@each_front
@ranks(2)
def test_wrapping_by_hand_nested_and_side_by_side(rank, world_size, front):
    torch.manual_seed(0)
    plain = Transformer()
    by_hand = copy.deepcopy(plain)
    by_hand.blocks[0].mlp = shard(front, by_hand.blocks[0].mlp)
    by_hand.blocks[0] = shard(front, by_hand.blocks[0])
    by_hand.blocks[2] = shard(front, by_hand.blocks[2])
    wrapped = shard(front, by_hand)
    ddp = DDP(plain)
    train(ddp, _adamw(ddp), rank, range(3))
    train(wrapped, _adamw(wrapped), rank, range(3))
    assert_same_values(wrapped, ddp)


@each_front
@ranks(2)
def test_plain_root_with_wrapped_children(rank, world_size, front):
    """Without a wrapper around all, each child is a root of its own; the rest is reduced by hand."""
    torch.manual_seed(0)
    plain = Transformer(blocks=2)
    mixed = copy.deepcopy(plain)
    mixed.blocks = nn.ModuleList(shard(front, block) for block in mixed.blocks)
    ddp = DDP(plain)
    for model in (ddp, mixed):
        loss_of(model, tokens(rank, 0)).backward()
    for index, block in enumerate(mixed.blocks):
        assert_same_grads(block, ddp.module.blocks[index])


@each_form
@ranks(2)
def test_sync_module_states_starts_from_the_first_rank(rank, world_size, use_orig_params):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    module[1].running_mean.fill_(rank)
    expected = gather_objects(module.state_dict())[0]
    wrapped = FSDP(
        module, auto_wrap_policy=always_wrap_policy, sync_module_states=True, use_orig_params=use_orig_params
    )
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, expected[name]), name


@ranks(4)
def test_process_group_of_some_ranks(rank, world_size):
    import torch.distributed as dist

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    plain, wrapped = twins("flat", Transformer, process_group=group, auto_wrap_policy=WRAPPINGS["block"]())
    ddp = DDP(plain, process_group=group)
    train(ddp, _adamw(ddp), rank, range(3))
    train(wrapped, _adamw(wrapped), rank, range(3))
    assert_same_values(wrapped, ddp)


@ranks(2)
def test_device_mesh_and_device_id(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for device_id in (None, "cpu", "cpu:0", torch.device("cpu")):
        plain, wrapped = twins("flat", Transformer, device_mesh=mesh, device_id=device_id)
        ddp = DDP(plain)
        train(ddp, _adamw(ddp), rank, range(2))
        train(wrapped, _adamw(wrapped), rank, range(2))
        assert_same_values(wrapped, ddp)
