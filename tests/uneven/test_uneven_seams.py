"""`uneven` beside what else the package can do."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_nets
import tp_nets
from bed import ranks
from bed.memory import live_bytes, only_new_objects
from beside import assert_close_grads, large_batch_backward
from composable import shard_blocks
from fronts import FULL, assert_same_grads, assert_same_values, each_front, full_grads, shard, squares, twins
from fsdp_wrap import MixedPrecision, ShardingStrategy, clip_grad_norm_, fully_shard, uneven
from fsdp_wrap import comm_hooks as hooks
from fsdp_wrap._core import Phase, PlugIn, everywhere
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.optim import Muon, step_in_backward
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Transformer, loss_of, tokens

CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def pair(front: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, nn.Module]:
    policy = WRAPPINGS["block"]()
    return twins(front, partial(Transformer, blocks=2), dtype, auto_wrap_policy=policy, **options)


def run(model: nn.Module, rank: int, count: int) -> Any:
    with uneven(model) as work:
        for step in range(count):
            loss_of(model, tokens(rank, step)).backward()
    return work


def run_pooled(plain: nn.Module, batches: list[int]) -> None:
    for rank, count in enumerate(batches):
        for step in range(count):
            (loss_of(plain, tokens(rank, step)) / sum(batches)).backward()


@pytest.mark.parametrize("count", [1, 2])
@each_front
@ranks(2)
def test_with_as_many_batches_the_bits_are_those_of_the_even_case(rank, world_size, front, count):
    _, even = pair(front, torch.float32)
    _, model = pair(front, torch.float32)
    for step in range(count):
        loss_of(even, tokens(rank, step)).backward()
    for param in even.parameters():
        if param.grad is not None:
            param.grad.div_(count)
    work = run(model, rank, count)
    assert work.passes_helped == 0
    grads = full_grads(model)
    for name, value in full_grads(even).items():
        assert torch.equal(grads[name], value), name


@each_front
@ranks(2)
def test_a_forward_from_before_has_its_backward_afterwards(rank, world_size, front):
    """Whether ranks have had forwards meanwhile, which share no collectives, has no part in it."""
    plain, model = pair(front)
    loss_of(model, tokens(rank, 0)).backward()  # units that small share collectives from the second one on
    large_batch_backward(plain, [0])
    loss = loss_of(model, tokens(rank, 1))
    with torch.no_grad(), uneven(model):
        for step in range(rank):
            model(tokens(rank, step))
    loss.backward()
    large_batch_backward(plain, [1])
    assert_close_grads(model, plain)


@each_front
@ranks(3)
def test_generation_of_different_lengths(rank, world_size, front):
    plain, model = pair(front)
    lengths = [4, 0, 2]
    with torch.no_grad(), uneven(model) as work:
        outputs = [model(tokens(rank, step)) for step in range(lengths[rank])]
    assert work.passes_helped == max(lengths) - lengths[rank]
    torch.testing.assert_close(outputs, [plain(tokens(rank, step)) for step in range(lengths[rank])], **CLOSE)
    assert all(param.grad is None for param in model.parameters())


@ranks(2)
def test_a_policy_and_its_reference(rank, world_size):
    plain, policy = pair("orig")
    _, reference = pair("composable")
    batches = [2, 1]
    with uneven(policy, reference):
        for step in range(batches[rank]):
            with torch.no_grad():
                target = reference(tokens(rank, step))
            (policy(tokens(rank, step)) - 2 * target).square().mean().backward()
    for other, count in enumerate(batches):
        for step in range(count):
            target = plain(tokens(other, step)).detach()
            ((plain(tokens(other, step)) - 2 * target).square().mean() / sum(batches)).backward()
    assert_same_grads(policy, plain, **CLOSE)


@each_front
@ranks(2)
def test_units_that_are_updated_in_the_backward(rank, world_size, front):
    plain, model = pair(front)
    step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = [1, 3]
    run(model, rank, batches[rank])
    for step in range(max(batches)):
        active = [other for other, count in enumerate(batches) if step < count]
        for other in active:
            (loss_of(plain, tokens(other, step)) / len(active)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_values(model, plain, **CLOSE)
    run(model, rank, 1)  # evenly again: the mean over all ranks
    large_batch_backward(plain, [0])
    optimizer.step()
    assert_same_values(model, plain, **CLOSE)


@pytest.mark.parametrize("strategy", [FULL, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_a_communication_hook_that_averages(rank, world_size, strategy):
    plain, model = pair("orig", sharding_strategy=strategy)
    hook = hooks.reduce_scatter_hook if strategy is FULL else hooks.allreduce_hook
    hooks.register_comm_hook(model, hooks.DefaultState(dist.group.WORLD), hook)
    run(model, rank, [1, 3][rank])
    run_pooled(plain, [1, 3])
    assert_same_grads(model, plain, **CLOSE)


@ranks(4)
def test_ranks_of_one_tensor_parallel_group_have_their_batches_together(rank, world_size):
    whole, data, inner = tp_nets.mesh_of("flat")
    plain = tp_nets.net().double()
    model = tp_nets.parallelize(copy.deepcopy(plain), inner, "columns")
    shard_blocks(model, fully_shard, mesh=data)
    batches = [3, 1]
    with uneven(model):
        for step in range(batches[data.get_local_rank()]):
            tp_nets.loss_of(model, tp_nets.own_batch(tp_nets.batches(2, step), data))
    for place, count in enumerate(batches):
        for step in range(count):
            tp_nets.loss_of(plain, tp_nets.batches(2, step)[place])
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / sum(batches), **CLOSE)


class Held(PlugIn):
    """The most bytes of full parameters at one time, and of how many units."""

    def __init__(self) -> None:
        self.units: dict[Any, int] = {}
        self.most = 0

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        self.units[unit] = self.units.get(unit, 0) + nbytes
        self.most = max(self.most, sum(map(bool, self.units.values())))

    def sharded(self, unit: Any, phase: Phase, nbytes: int) -> None:
        self.units[unit] -= nbytes


@each_front
@ranks(2)
def test_a_rank_without_a_batch_holds_two_units_at_most(rank, world_size, front):
    model = squares(front, units=6)
    held = Held()
    with everywhere.having(held), uneven(model) as work:
        for _ in range(2 * rank):
            model(torch.randn(2, 150)).sum().backward()
    assert work.passes_helped == 2 * (1 - rank)
    if rank == 0:
        assert held.most == 2


@each_front
@ranks(2)
def test_a_scaler_and_mixed_precision(rank, world_size, front):
    """Also where a rank has nothing to scale; where none has, all ranks say so."""
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    plain, model = pair(front, torch.float32, mixed_precision=precision)
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=64.0), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="no rank has called scale"):
        scaler.unscale_(optimizer)
    batches = [3, 0]
    with uneven(model) as work:
        for step in range(batches[rank]):
            work.backward(scaler.scale(loss_of(model, tokens(rank, step))), weight=1 + step)
    scaler.unscale_(optimizer)
    weights = sum(1 + step for count in batches for step in range(count))
    for other, count in enumerate(batches):
        for step in range(count):
            (loss_of(plain, tokens(other, step)) * (1 + step) / weights).backward()
    assert_same_grads(model, plain, rtol=0.02, atol=2e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0


@ranks(2)
def test_whole_matrices_are_updated_after_the_context(rank, world_size):
    _, model = pair("composable", torch.float32)
    _, even = pair("composable", torch.float32)
    optimizers = [Muon(net, lr=0.01) for net in (model, even)]
    run(model, rank, 2 * rank)  # rank 1 alone has batches
    for step in range(2):  # the same, run by both
        (loss_of(even, tokens(1, step)) / 2).backward()
    for net, optimizer in zip((model, even), optimizers):
        clip_grad_norm_(net, 1.0)
        optimizer.step()
    params = dict(model.named_parameters())
    for name, param in even.named_parameters():
        torch.testing.assert_close(params[name].full_tensor(), param.full_tensor(), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_reductions_in_fewer_bytes(rank, world_size):
    plain, model = pair("orig", torch.float32)
    compress(model, gathers="int8", reductions="int8")
    run(model, rank, 2 * rank)
    run_pooled(plain, [0, 2])
    for name, value in full_grads(model).items():
        expected = dict(plain.named_parameters())[name].grad
        assert (value - expected).norm() <= 0.05 * expected.norm() + 1e-4, name


@each_front
@ranks(2)
def test_parameters_that_are_replaced_or_frozen_between(rank, world_size, front):
    plain, model = pair(front)
    run(model, rank, 1)
    for net in (plain, model):
        net.zero_grad()
        for name, param in net.named_parameters():
            param.requires_grad_("norm" not in name or front == "flat")
            if front == "composable":
                param.detach().mul_(2)
            else:
                param.data = param.data * 2  # a rank without a batch must gather these
    run(model, rank, 2 * rank)
    run_pooled(plain, [0, 2])
    assert_close_grads(model, plain, **CLOSE)


@ranks(2)
def test_over_gloo_alone(rank, world_size):
    plain, model = pair("orig", shared_memory=False)
    run(model, rank, 3 * rank)
    run_pooled(plain, [0, 3])
    assert_same_grads(model, plain, **CLOSE)


@pytest.mark.slow
@ranks(2, 3)
def test_500_steps_in_which_ranks_run_dry_at_random(rank, world_size):
    torch.manual_seed(0)
    model = shard("orig", Transformer(blocks=1), WRAPPINGS["block"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rng, losses, sizes = random.Random("dry"), [], []
    with only_new_objects():
        for step in range(500):
            batches = [rng.choice([0, 0, 1, 2]) for _ in range(world_size)]
            with uneven(model) as work:
                for index in range(batches[rank]):
                    loss = loss_of(model, tokens(rank, index))
                    work.backward(loss, weight=1 + index)
                    losses.append(loss.item())
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step in (100, 499):
                sizes.append(live_bytes())
    assert sizes[1] <= sizes[0] + 4096
    assert losses[-1] < losses[0]


@ranks(4)
def test_experts_on_other_ranks(rank, world_size):
    data, one_expert, spread = moe_nets.meshes()
    plain = moe_nets.net()
    model = moe_nets.distribute(copy.deepcopy(plain), spread)
    where = moe_nets.placing(moe_nets.info_of(one_expert))
    moe_nets.shard(model, fully_shard, mesh=data, shard_placement_fn=where)
    batches = [2, 2, 1, 1]  # ranks 0 and 1 send each other tokens, and so do 2 and 3
    with uneven(model):
        for step in range(batches[rank]):
            moe_nets.loss_of(model, moe_nets.batches(step)[rank])
    for other, count in enumerate(batches):
        for step in range(count):
            moe_nets.loss_of(plain, moe_nets.batches(step)[other])
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / sum(batches), **CLOSE)
