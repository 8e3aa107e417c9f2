"""Wrong uses of `uneven` are refused by name, on all ranks, and lose nothing."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import nn

import told
import tp_nets
from bed import ranks
from composable import shard_blocks
from forks import run_forks
from fronts import assert_same_grads, each_front, no_sync, shard
from fsdp_wrap import checkpoint, clip_grad_norm_, fully_shard, uneven
from fsdp_wrap._core import NotRootError
from fsdp_wrap._runtime import step_of, units_in
from fsdp_wrap.optim import step_in_backward
from models import WRAPPINGS, Transformer, loss_of, tokens


def model_of(front: str = "orig") -> nn.Module:
    torch.manual_seed(0)
    return shard(front, Transformer(blocks=2), WRAPPINGS["block"]())


def backward(model: nn.Module, rank: int) -> None:
    loss_of(model, tokens(rank, 0)).backward()


def zero_between(model: nn.Module, rank: int) -> None:
    backward(model, rank)
    model.module.blocks[0].zero_grad()
    backward(model, rank)


def scale(model: nn.Module, rank: int) -> None:
    backward(model, rank)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


def switch_between(model: nn.Module, rank: int) -> None:
    loss = loss_of(model, tokens(rank, 0))
    with no_sync(model):
        loss.backward()


MISTAKES = told.read(r"""
step
    > backward(model, rank); torch.optim.SGD(model.parameters(), lr=0.1).step()
    RuntimeError: SGD.step\(\) was called inside uneven\(\) on rank \d
clip
    > backward(model, rank); clip_grad_norm_(model, 1.0)
    RuntimeError: clip_grad_norm_.* must not run inside uneven
nest
    > with uneven(model): backward(model, rank)
    RuntimeError: uneven\(\) must not run inside uneven
state dict
    > model.state_dict()
    RuntimeError: state_dict\(\) must not run inside uneven
negative weight
    > work.backward(loss_of(model, tokens(rank, 0)), weight=-1.0)
    ValueError: finite and not negative, but is -1.0
weight that is no number
    > work.backward(loss_of(model, tokens(rank, 0)), weight=float("nan"))
    ValueError: finite and not negative, but is nan
weights of zero
    > work.backward(loss_of(model, tokens(rank, 0)), weight=0.0)
    ValueError: the weights of all 2 backwards of .* are zero
zero_grad
    > zero_between(model, rank)
    RuntimeError: gradients of unit 'blocks.0' were written to or dropped
scaled gradients
    > scale(model, rank)
    RuntimeError: were written to or dropped .* on rank \d
checkpoint
    > backward(model, rank); checkpoint.save("nowhere", model, step=0)
    RuntimeError: checkpoint.save\(\) must not run inside uneven
no_sync
    > switch_between(model, rank)
    ValueError: no_sync was entered or left between a forward and a backward
""")


@pytest.mark.parametrize("name", MISTAKES)
@ranks(2)
def test_a_mistake_of_all_ranks(rank, world_size, name):
    mistake = MISTAKES[name]
    model = model_of()
    loss_of(model, tokens(rank, 1)).backward()
    before = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(getattr(builtins, mistake.kind), match=mistake.says), uneven(model) as work:
        exec(mistake.source, {**globals(), "model": model, "work": work, "rank": rank})
    for param, value, grad in zip(model.parameters(), values, before, strict=True):
        assert torch.equal(param, value)
        assert (None if param.grad is None else param.grad.tolist()) == grad
    with uneven(model):  # and the next step is as ever
        loss_of(model, tokens(rank, 1)).backward()


@each_front
@ranks(2)
def test_what_users_have_set_is_theirs_again(rank, world_size, front):
    """Rank 0 has no batch, and follows one whose backwards are under `no_sync` or not the last."""
    model = model_of(front)
    step = step_of(units_in(model)[""])
    with uneven(model):
        for _ in range(2 * rank):
            with no_sync(model):
                loss_of(model, tokens(rank, 0)).backward()
    assert (step.syncs, step.sums_over_replicas, step.ending.waits) == (True, True, True)
    with uneven(model):
        for _ in range(rank):
            step.ending.last = False
            loss_of(model, tokens(rank, 0)).backward()
            step.ending.last = True
    assert step.ending.waits
    with pytest.raises(RuntimeError, match="a document is broken"), uneven(model):
        for _ in range(rank):
            with no_sync(model):
                loss_of(model, tokens(rank, 0)).backward()
            raise RuntimeError("a document is broken")
    assert (step.syncs, step.sums_over_replicas, step.plug_ins.align) == (True, True, False)


@ranks(2)
def test_sums_stay_sums_without_averages(rank, world_size):
    plain, model = Transformer(blocks=2), model_of()
    plain.load_state_dict(model.state_dict())
    with uneven(model, average=False):
        for step in range(2 * rank):
            loss_of(model, tokens(rank, step)).backward()
    for step in range(2):
        (loss_of(plain, tokens(1, step)) / world_size).backward()
    assert_same_grads(model, plain, rtol=1e-5, atol=1e-7)


@ranks(2)
def test_models_that_cannot_be_meant(rank, world_size):
    model = model_of()
    for models, kind, says in (
        ([], ValueError, "needs a model"),
        ([3], TypeError, "not a int"),
        ([nn.Linear(2, 2)], ValueError, "no wrapped or sharded module"),
        ([model.module.blocks[0]], NotRootError, "must be called on the root"),
    ):
        if kind is NotRootError:
            model(tokens(rank, 0))
        with pytest.raises(kind, match=says), uneven(*models):
            pass
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="that no_sync left on rank .* wait for a backward"), uneven(model):
        pass


@ranks(2)
def test_weights_of_units_that_are_updated_in_the_backward(rank, world_size):
    model = model_of()
    step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match="leave out weight="), uneven(model) as work:
        work.backward(loss_of(model, tokens(rank, 0)), weight=2)


def differ(rank: int, world_size: int, how: str) -> str:
    """Ranks do something else; returns what a rank is told."""
    model, other = model_of(), model_of()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        if how == "entered on one rank only":
            if rank == 0:
                with uneven(model):
                    loss_of(model, tokens(rank, 0)).backward()
            else:
                loss_of(model, tokens(rank, 0)).backward()
        elif how == "a model that was not given":
            with uneven(model):
                for _ in range(2 * rank):
                    loss_of(other, tokens(rank, 0)).backward()
                    loss_of(model, tokens(rank, 0)).backward()
        else:
            with uneven(model, other):
                loss_of((model, other)[rank], tokens(rank, 0)).backward()
    return str(caught.value)


EXPECTED = {
    "entered on one rank only": "ranks communicate for different units: rank 0 agrees on",
    "a model that was not given": "pass all models that are used inside",
    "another model first": "another model: ranks that have a batch must run the same models in one order",
}


def test_ranks_that_differ():
    for how, ends in zip(EXPECTED, run_forks(differ, [(how,) for how in EXPECTED], 2)):
        for end in ends:
            assert EXPECTED[how] in end.value, how


@ranks(4)
def test_ranks_of_one_tensor_parallel_group_that_differ(rank, world_size):
    _, data, inner = tp_nets.mesh_of("flat")
    model = tp_nets.parallelize(tp_nets.net(), inner, "columns")
    shard_blocks(model, fully_shard, mesh=data)
    says = r"ranks \[0, 1\] hold parts of the same parameters .* only \[0\] of them begin a forward"
    with pytest.raises((ValueError, RuntimeError), match=says), uneven(model):
        if rank in (0, 2, 3):
            tp_nets.loss_of(model, tp_nets.own_batch(tp_nets.batches(2, 0), data))
