"""Gradients of `uneven` are those of the pooled batch: a plain model runs the batches of all ranks."""

from __future__ import annotations

import copy
import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from beside import assert_close_grads
from fronts import FRONTS, chosen, each_front, no_sync, shard, twins
from fsdp_wrap import BackwardPrefetch, CPUOffload, set_travel_together_bytes, uneven
from fsdp_wrap.wrap import NameWrapPolicy
from models import WRAPPINGS, Transformer, loss_of, tokens
from slopes import SLOPES, example, net, sum_backwards

CLOSE = {"rtol": 0.0, "atol": 1e-12}


class Checkpointed(Transformer):
    """Recomputes its blocks in the backward."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Draw(NamedTuple):
    """One draw of options: batches by rank, for two contexts, and what the model is made of."""

    front: str
    strategy: str
    wrapping: str
    prefetch: str
    forward_prefetch: bool
    checkpointing: str
    offload: bool
    batched: bool
    weighted: bool
    unsynced: float
    loops: str
    batches: list[list[int]]


def drawn(world_size: int, number: int) -> Draw:
    rng = random.Random(f"uneven {world_size} {number}")
    loops = rng.choice(["alternating", "alternating", "forwards first"])
    # Ranks that run several forwards before their backwards are to run equally many, or none.
    counts = [0, 0, 1, 2, 3, 5] if loops == "alternating" else [0, rng.randint(1, 3)]
    return Draw(
        rng.choice(FRONTS),
        rng.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]),
        rng.choice(["block", "block", "whole"]),
        rng.choice(["BACKWARD_PRE", "BACKWARD_POST", "none"]),
        rng.random() < 0.3,
        rng.choice(["none", "none", "reentrant", "not reentrant"]),
        rng.random() < 0.25,
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice([0.0, 0.0, 0.5, 1.0]),
        loops,
        [[rng.choice(counts) for _ in range(world_size)] for _ in range(2)],
    )


def sharded(plain: Transformer, draw: Draw, world_size: int) -> nn.Module:
    module = copy.deepcopy(plain)
    if draw.checkpointing != "none":
        module.__class__ = Checkpointed
        module.reentrant = draw.checkpointing == "reentrant"
    options = chosen(draw.front, draw.strategy, world_size)
    if draw.front != "composable":
        prefetch = None if draw.prefetch == "none" else BackwardPrefetch[draw.prefetch]
        options |= {"backward_prefetch": prefetch, "forward_prefetch": draw.forward_prefetch}
    if draw.offload and draw.strategy != "NO_SHARD":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    model = shard(draw.front, module, WRAPPINGS[draw.wrapping](), **options)
    set_travel_together_bytes(model, None if draw.batched else 0)
    return model


def run_batches(model: nn.Module, work: Any, draw: Draw, rank: int, context: int) -> None:
    rng = random.Random(f"{draw} {rank} {context}")
    losses = []

    def weight(index: int) -> float | None:
        return weight_of(rank, index) if draw.weighted else None

    for index in range(draw.batches[context][rank]):
        accumulates: AbstractContextManager[None] = nullcontext()
        if draw.loops == "alternating" and rng.random() < draw.unsynced:
            accumulates = no_sync(model)
        with accumulates:
            losses.append(loss_of(model, tokens(rank, index + 10 * context)))
            if draw.loops == "alternating":
                work.backward(losses[-1], weight(index))
    if draw.loops == "forwards first":
        for index, loss in enumerate(losses):
            work.backward(loss, weight(index))


def weight_of(rank: int, index: int) -> float:
    return 1.0 + 3 * rank + index


def run_pooled(plain: nn.Module, draw: Draw, context: int) -> None:
    """Adds the gradients of the mean over the batches of all ranks to those of a plain model."""
    every = [(rank, index) for rank, count in enumerate(draw.batches[context]) for index in range(count)]
    weights = [weight_of(*each) if draw.weighted else 1.0 for each in every]
    for (rank, index), weight in zip(every, weights):
        (loss_of(plain, tokens(rank, index + 10 * context)) * weight / sum(weights)).backward()


@pytest.mark.parametrize(
    ("first", "last"), [(0, 9), pytest.param(9, 68, marks=pytest.mark.slow)], ids=["few", "many"]
)
@ranks(2, 3, 4)
def test_gradients_are_those_of_the_pooled_batch(rank, world_size, first, last):
    for number in range(first, last):
        draw = drawn(world_size, number)
        torch.manual_seed(0)
        plain = Transformer(blocks=2).double()
        model = sharded(plain, draw, world_size)
        for context in range(2):  # the second one adds to the gradients of the first
            with uneven(model) as work:
                run_batches(model, work, draw, rank, context)
            run_pooled(plain, draw, context)
        try:
            assert_close_grads(model, plain, **CLOSE)
        except AssertionError as error:
            raise AssertionError(f"draw {number}: {draw}") from error


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["", "no_sync"])
@pytest.mark.parametrize("name", SLOPES)
@each_front
@ranks(2)
def test_backwards_for_inputs_alone_do_not_count(rank, world_size, front, name, accumulates, weighted):
    """Nor do they reduce what `no_sync` has left, or say that it was reduced."""
    plain, model = twins(front, net, torch.float64, auto_wrap_policy=NameWrapPolicy("Sequential"))
    places = [(0, 0), (1, 0), (1, 1), (1, 2)]
    weights = {place: weight_of(*place) if weighted else 1.0 for place in places}
    with uneven(model) as work:
        for place in places:

            def backward(loss: torch.Tensor, weight: float = weights[place]) -> None:
                work.backward(loss, weight if weighted else None)

            if place[0] == rank:
                with no_sync(model) if accumulates else nullcontext():
                    SLOPES[name](model, *example(*place), backward)
                torch.autograd.grad(model(x := example(*place)[0]).square().sum(), x)
    sum_backwards(plain, name, weights)
    assert_close_grads(model, plain, **CLOSE)
