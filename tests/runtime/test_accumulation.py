"""Gradient accumulation, with and without `no_sync`, against DDP and a plain model."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.references import count_collectives
from fronts import (
    assert_same_grads,
    assert_same_values,
    each_form,
    each_front,
    full_grads,
    no_sync,
    twins,
)
from fsdp_wrap import EventKind, MixedPrecision, ShardingStrategy, record_events
from fsdp_wrap import FullyShardedDataParallel as FSDP
from models import WRAPPINGS, Transformer, loss_of, tokens, train, transformer_twins

each_wrapping = pytest.mark.parametrize("wrapping", ["whole", "block"])


def _accumulate(model, rank, inside):
    """One backward per entry of `inside`, within `no_sync` where it is True."""
    for step, unsynced in enumerate(inside):
        if unsynced:
            with no_sync(model):
                loss_of(model, tokens(rank, step)).backward()
        else:
            loss_of(model, tokens(rank, step)).backward()


@each_front
@each_wrapping
@ranks(2)
def test_no_sync_then_sync_is_bit_equal_to_ddp(rank, world_size, front, wrapping):
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS[wrapping]())
    ddp = DDP(plain)
    for model in (ddp, wrapped):
        _accumulate(model, rank, [True, True, False])
    assert_same_grads(wrapped, ddp)


INTERLEAVINGS = ["TTTFFFTTTF", "FFFTTTFFF", "FTFTF", "TF"]
ZEROINGS = ["to_none", "in_place"]


@pytest.mark.parametrize(
    ("front", "inside", "zeroing"),
    [*itertools.product(("flat", "orig"), INTERLEAVINGS, ZEROINGS)]
    + [("composable", "TTTFFFTTTF", "in_place"), ("composable", "FTFTF", "to_none")],
)
@ranks(2)
def test_every_interleaving_equals_one_large_batch(rank, world_size, front, inside, zeroing):
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    for _ in range(2):  # the second round starts from zeroed gradients
        wrapped.zero_grad(set_to_none=zeroing == "to_none")
        _accumulate(wrapped, rank, [letter == "T" for letter in inside])
    losses = [loss_of(plain, tokens(r, step)) for r in range(world_size) for step in range(len(inside))]
    (sum(losses) / world_size).backward()
    assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("zeroing", ["to_none", "in_place"])
@each_front
@ranks(2)
def test_zero_grad_forgets_what_no_sync_accumulated(rank, world_size, front, zeroing):
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    with no_sync(wrapped):
        loss_of(wrapped, tokens(rank, 7)).backward()
    wrapped.zero_grad(set_to_none=zeroing == "to_none")
    loss_of(wrapped, tokens(rank, 0)).backward()
    (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
    assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


@each_front
@ranks(2)
def test_no_sync_reduces_nothing(rank, world_size, front):
    _, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    with no_sync(wrapped), count_collectives() as traffic:
        loss_of(wrapped, tokens(rank, 0)).backward()
    assert set(traffic) == {"all_gather_into_tensor"}
    with count_collectives() as traffic:
        loss_of(wrapped, tokens(rank, 0)).backward()
    assert traffic["reduce_scatter_tensor"].calls == 4  # three blocks and the root


@ranks(2)
def test_no_sync_before_the_first_forward_and_nested(rank, world_size):
    plain, wrapped = twins("orig", Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    ddp = DDP(plain)
    for model in (ddp, wrapped):
        with model.no_sync():
            with model.no_sync():
                loss_of(model, tokens(rank, 0)).backward()
            loss_of(model, tokens(rank, 1)).backward()
        loss_of(model, tokens(rank, 2)).backward()
    assert_same_grads(wrapped, ddp)


@each_front
@ranks(2)
def test_training_goes_on_after_accumulation(rank, world_size, front):
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    ddp = DDP(plain)
    for model in (ddp, wrapped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _accumulate(model, rank, [True, False])
        optimizer.step()
        train(model, optimizer, rank, range(3))
    assert_same_values(wrapped, ddp)


def _gathers(events):
    """How often each unit was gathered."""
    return Counter(event.unit for event in events if event.kind is EventKind.UNSHARD)


@each_form
@pytest.mark.parametrize(
    ("strategy", "under_no_sync", "outside"),
    [
        ("FULL_SHARD", {"": 3, "blocks.0": 6, "blocks.1": 6, "blocks.2": 6}, 2),
        ("SHARD_GRAD_OP", {"": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1}, 1),
        ("_HYBRID_SHARD_ZERO2", {"": 1, "blocks.0": 1, "blocks.1": 1, "blocks.2": 1}, 1),
    ],
)
@ranks(4)
def test_what_stays_for_backward_stays_under_no_sync(
    rank, world_size, use_orig_params, strategy, under_no_sync, outside
):
    mesh = {}
    if strategy.startswith("_HYBRID"):
        mesh = {"device_mesh": torch.distributed.init_device_mesh("cpu", (2, 2))}
    plain, wrapped = transformer_twins(use_orig_params, strategy, **mesh)
    for _ in range(2):
        with record_events() as events:
            _accumulate(wrapped, rank, [True, True, True])
        assert _gathers(events) == under_no_sync
        with record_events() as events:
            _accumulate(wrapped, rank, [False])
        taken_over = strategy != "FULL_SHARD"
        assert _gathers(events)["blocks.0"] == (0 if taken_over else 2)
        with record_events() as events:
            _accumulate(wrapped, rank, [False])
        assert _gathers(events)["blocks.0"] == outside, "backward outside of no_sync frees"
    steps = [0, 1, 2, 0, 0] * 2
    losses = [loss_of(plain, tokens(r, step)) for r in range(world_size) for step in steps]
    (sum(losses) / world_size).backward()
    assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


def _written_to(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _replaced(model):
    for param in model.parameters():
        param.data = param.data * 0.5


def _stepped(model):
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def _loaded(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _summoned(model):
    with FSDP.summon_full_params(model):
        _written_to(model)


@each_form
@pytest.mark.parametrize("change", [_written_to, _replaced, _stepped, _loaded, _summoned])
@ranks(2)
def test_what_has_changed_is_not_taken_over_under_no_sync(rank, world_size, use_orig_params, change):
    plain, wrapped = transformer_twins(use_orig_params, "SHARD_GRAD_OP")
    with wrapped.no_sync():
        for step in range(2):
            for model in (plain, wrapped):
                loss_of(model, tokens(0, step)).backward()
        for model in (plain, wrapped):
            if change is _stepped:  # with the same gradients: those of `wrapped` wait to be reduced
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
            change(model)
        expected = loss_of(plain, tokens(rank, 2))
        torch.testing.assert_close(loss_of(wrapped, tokens(rank, 2)), expected, rtol=1e-12, atol=0.0)


@each_form
@ranks(2)
def test_a_parameter_that_was_replaced_under_no_sync_is_refused(rank, world_size, use_orig_params):
    _, wrapped = transformer_twins(use_orig_params, "SHARD_GRAD_OP")
    with wrapped.no_sync():
        loss_of(wrapped, tokens(rank, 0)).backward()
        head = wrapped.module.head
        head.weight = nn.Parameter(torch.ones(head.out_features, head.in_features))
        with pytest.raises(ValueError, match="was replaced by a Parameter"):
            loss_of(wrapped, tokens(rank, 1))


@each_form
@ranks(2)
def test_parameters_that_stay_under_no_sync_are_of_the_param_dtype(rank, world_size, use_orig_params):
    """Evaluation in between, and a backward that fails, leave a model that goes on as one that gathers."""
    results = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        _, wrapped = twins(
            "orig" if use_orig_params else "flat",
            Transformer,
            auto_wrap_policy=WRAPPINGS["block"](),
            sharding_strategy=strategy,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
        with wrapped.no_sync():
            loss_of(wrapped, tokens(rank, 0)).backward()
            with torch.no_grad():
                loss_of(wrapped, tokens(rank, 1))
            loss_of(wrapped, tokens(rank, 1)).backward()
        loss_of(wrapped, tokens(rank, 2)).backward()
        results.append(full_grads(wrapped))
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name
