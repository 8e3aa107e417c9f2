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
from beside import large_batch_backward
from fronts import accumulating, assert_same_grads, assert_same_values, full_grads, no_sync, twins
from fsdp_wrap import EventKind, MixedPrecision, ShardingStrategy, record_events
from fsdp_wrap import FullyShardedDataParallel as FSDP
from models import WRAPPINGS, Transformer, loss_of, tokens, train, transformer_twins

each_front = pytest.mark.parametrize("front", ["orig", "composable"])


def _accumulate(model, rank, letters):
    """One backward per letter, within `no_sync` where it is T."""
    for step, letter in enumerate(letters):
        with accumulating(model, letter):
            loss_of(model, tokens(rank, step)).backward()


@each_front
@ranks(2)
def test_no_sync_then_sync_is_bit_equal_to_ddp(rank, world_size, front):
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    ddp = DDP(plain)
    with count_collectives() as traffic:
        _accumulate(wrapped, rank, "T")  # before the first forward
    assert set(traffic) == {"all_gather_into_tensor"}
    with count_collectives() as traffic:
        _accumulate(wrapped, rank, "F")
    assert traffic["reduce_scatter_tensor"].calls == 4  # three blocks and the root
    _accumulate(ddp, rank, "T")
    _accumulate(ddp, rank, "F")
    assert_same_grads(wrapped, ddp)
    for model in (ddp, wrapped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        with no_sync(model):
            if front == "orig":
                with no_sync(model):  # nested
                    loss_of(model, tokens(rank, 3)).backward()
            loss_of(model, tokens(rank, 1)).backward()
        loss_of(model, tokens(rank, 2)).backward()
        optimizer.step()
        train(model, optimizer, rank, range(3))
    assert_same_values(wrapped, ddp)


@each_front
@ranks(2)
def test_zero_grad_forgets_what_no_sync_accumulated(rank, world_size, front):
    """After it, every interleaving equals one large batch."""
    plain, wrapped = twins(front, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    for letters, to_none in itertools.product(["TTFFTTF", "FFTTFF", "TF", "F"], [True, False]):
        with no_sync(wrapped):
            loss_of(wrapped, tokens(rank, 7)).backward()
        wrapped.zero_grad(set_to_none=to_none)
        plain.zero_grad()
        _accumulate(wrapped, rank, letters)
        large_batch_backward(plain, range(len(letters)))
        assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


def _gathers(model, rank, letters):
    """How often each unit was gathered."""
    with record_events() as events:
        _accumulate(model, rank, letters)
    return Counter(event.unit for event in events if event.kind is EventKind.UNSHARD)


@ranks(4)
def test_what_stays_for_backward_stays_under_no_sync(rank, world_size):
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        mesh = {}
        if strategy.startswith("_HYBRID"):
            mesh = {"device_mesh": torch.distributed.init_device_mesh("cpu", (2, 2))}
        stays = strategy != "FULL_SHARD"
        plain, wrapped = transformer_twins(True, strategy, **mesh)
        for _ in range(2):
            expected = dict.fromkeys(["", *blocks], 1) if stays else {"": 3, **dict.fromkeys(blocks, 6)}
            assert _gathers(wrapped, rank, "TTT") == expected
            assert _gathers(wrapped, rank, "F")["blocks.0"] == (0 if stays else 2)
            assert _gathers(wrapped, rank, "F")["blocks.0"] == (1 if stays else 2), (
                "backward outside of no_sync frees"
            )
        large_batch_backward(plain, [0, 1, 2, 0, 0] * 2)
        assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


def _written_to(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def _replaced(model):
    for param in model.parameters():
        param.data = param.data * 0.5


def _stepped(model):
    """With the same gradients: those of the wrapped model wait to be reduced."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def _loaded(model):
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def _summoned(model):
    with FSDP.summon_full_params(model):
        _written_to(model)


@ranks(2)
def test_what_has_changed_is_not_taken_over_under_no_sync(rank, world_size):
    for change in (_written_to, _replaced, _stepped, _loaded, _summoned):
        plain, wrapped = transformer_twins(True, "SHARD_GRAD_OP")
        with wrapped.no_sync():
            for model in (plain, wrapped):
                for step in range(2):
                    loss_of(model, tokens(0, step)).backward()
                change(model)
            expected = loss_of(plain, tokens(rank, 2))
            found = loss_of(wrapped, tokens(rank, 2))
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0, msg=change.__name__)
    _, wrapped = transformer_twins(True, "SHARD_GRAD_OP")
    with wrapped.no_sync():
        loss_of(wrapped, tokens(rank, 0)).backward()
        head = wrapped.module.head
        head.weight = nn.Parameter(torch.ones(head.out_features, head.in_features))
        with pytest.raises(ValueError, match="was replaced by a Parameter"):
            loss_of(wrapped, tokens(rank, 1))


@ranks(2)
def test_parameters_that_stay_under_no_sync_are_of_the_param_dtype(rank, world_size):
    """Evaluation in between leaves a model that goes on as one that gathers."""
    results = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        _, wrapped = twins(
            "orig",
            Transformer,
            auto_wrap_policy=WRAPPINGS["block"](),
            sharding_strategy=strategy,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )
        _accumulate(wrapped, rank, "T")
        with wrapped.no_sync():
            with torch.no_grad():
                loss_of(wrapped, tokens(rank, 1))
            loss_of(wrapped, tokens(rank, 1)).backward()
        loss_of(wrapped, tokens(rank, 2)).backward()
        results.append(full_grads(wrapped))
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name
