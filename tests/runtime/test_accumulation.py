"""Gradient accumulation, with and without `no_sync`, against DDP and a plain model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.references import count_collectives
from fronts import each_front, full_grads, full_state, no_sync, twins
from models import WRAPPINGS, Transformer, loss_of, named_state, tokens, train

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
    found = full_grads(wrapped)
    for name, param in named_state(ddp):
        assert torch.equal(found[name], param.grad), name


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
    found = full_grads(wrapped)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-10, atol=1e-12, msg=name)


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
    found = full_grads(wrapped)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-10, atol=1e-12, msg=name)


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
    found = full_grads(wrapped)
    for name, param in named_state(ddp):
        assert torch.equal(found[name], param.grad), name


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
    state = full_state(wrapped)
    for name, param in named_state(ddp):
        assert torch.equal(state[name], param.detach()), name
