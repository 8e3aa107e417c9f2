"""`allow_skipping`: experts and branches that some ranks do not run, beside a plain model of all batches."""

from __future__ import annotations

import copy
import random
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bed import ranks
from beside import assert_close_grads, mean_backward
from fronts import FRONTS, assert_same_values, chosen, each_front, full_grads, inner, no_sync, shard, twins
from fsdp_wrap import (
    CPUOffload,
    EventKind,
    allow_skipping,
    fully_shard,
    record_events,
    set_travel_together_bytes,
    uneven,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.wrap import NameWrapPolicy

WIDTH = 6
CLOSE = {"rtol": 0.0, "atol": 1e-12}
POLICY = NameWrapPolicy(["Layer", "Expert", "Half"])


class Expert(nn.Module):
    """Recomputes itself in the backward, if asked to; its second half is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), Half(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Half(nn.Linear):
    pass


class Layer(nn.Module):
    """A mixture of experts that calls those that it is told to."""

    def __init__(self, checkpoints: str) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Expert() for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        share = self.router(x)
        out = x + share.sum(-1, keepdim=True)
        for index in wanted:
            expert = self.experts[index]
            computed = (
                checkpoint(expert, x, use_reentrant=False) if self.checkpoints == "expert" else expert(x)
            )
            out = out + share[..., index : index + 1] * computed
        return out


class Mixture(nn.Module):
    def __init__(self, checkpoints: str = "none") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer(checkpoints) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, wanted: list[list[int]], twice: bool = False) -> torch.Tensor:
        x = self.layers[0](x, wanted[0])  # its input needs no gradient
        x = self.first(x)
        for index in (1, 2, 1) if twice else (1, 2):
            layer = self.layers[index]
            if self.checkpoints in ("reentrant", "layer"):
                x = checkpoint(layer, x, wanted[index], use_reentrant=self.checkpoints == "reentrant")
            else:
                x = layer(x, wanted[index])
        return self.last(x).square().mean()


class Draw(NamedTuple):
    front: str
    strategy: str
    checkpoints: str
    forward_prefetch: bool
    offload: bool
    batched: bool
    twice: bool
    context: bool
    unsynced: float
    frozen: bool


def drawn(number: int) -> Draw:
    rng = random.Random(f"skipping {number}")
    return Draw(
        rng.choice(FRONTS),
        rng.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]),
        rng.choice(["none", "none", "expert", "layer", "reentrant"]),
        rng.random() < 0.3,
        rng.random() < 0.2,
        rng.random() < 0.5,
        rng.random() < 0.2,
        rng.random() < 0.3,
        rng.choice([0.0, 0.0, 0.5]),
        rng.random() < 0.3,
    )


def sharded(plain: nn.Module, draw: Draw, world_size: int) -> nn.Module:
    options = chosen(draw.front, draw.strategy, world_size)
    if draw.front != "composable":
        options["forward_prefetch"] = draw.forward_prefetch
    if draw.offload and draw.strategy != "NO_SHARD":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    model = shard(draw.front, copy.deepcopy(plain), POLICY, **options)
    for name, module in [*model.named_modules()]:
        if name.rpartition(".")[0].endswith("experts"):
            allow_skipping(module)
    set_travel_together_bytes(model, None if draw.batched else 0)
    return model


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Returns an input and the experts that this rank runs in each layer: some, all or none."""
    rng = random.Random(f"batch {rank} {step}")
    torch.manual_seed(100 * step + rank)
    wanted = [rng.sample(range(3), rng.choice([0, 1, 1, 2, 3])) for _ in range(3)]
    return torch.randn(4, WIDTH, dtype=torch.float64), wanted


@pytest.mark.parametrize(
    ("first", "last"), [(0, 5), pytest.param(5, 32, marks=pytest.mark.slow)], ids=["few", "many"]
)
@ranks(2, 3, 4)
def test_gradients_are_those_of_all_ranks(rank, world_size, first, last):
    for number in range(first, last):
        draw = drawn(number)
        torch.manual_seed(0)
        plain = Mixture(draw.checkpoints).double()
        if draw.frozen:
            for name, param in plain.named_parameters():
                param.requires_grad_("experts" in name or "layers.0" in name)
        model = sharded(plain, draw, world_size)
        rng = random.Random(f"{draw} {world_size}")
        steps = [rng.random() >= draw.unsynced for _ in range(2)]
        for step, syncs in enumerate([*steps, True]):
            # Inside `uneven` all ranks but the last one have as many batches.
            with uneven(model) if draw.context else nullcontext():
                if not draw.context or rank != world_size - 1 or step != 1:
                    with nullcontext() if syncs else no_sync(model):
                        model(*batch_of(rank, step), draw.twice).backward()
        for step in range(3):
            members = world_size - (draw.context and step == 1)
            for member in range(members):
                (plain(*batch_of(member, step), draw.twice) / members).backward()
        try:
            assert_close_grads(model, plain, **CLOSE)
        except AssertionError as error:
            raise AssertionError(f"draw {number}: {draw}") from error


def mixture(front: str) -> tuple[nn.Module, nn.Module]:
    plain, model = twins(front, Mixture, torch.float64, auto_wrap_policy=POLICY)
    for layer in inner(model).layers:
        allow_skipping(inner(layer).experts)  # no unit itself
    return plain, model


@ranks(2)
def test_experts_whose_gradients_are_compressed(rank, world_size):
    """`tests/seams` combines skipped units with everything else."""
    plain, model = mixture("orig")
    compress(model, reductions="int8")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for step in range(3):
        model(*batch_of(rank, step)).backward()
        mean_backward(lambda member: plain(*batch_of(member, step)))  # noqa: B023
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, plain, rtol=0.0, atol=0.02)


@each_front
@ranks(2)
def test_a_penalty_on_gradients_has_skipped_parts_after_an_inference(rank, world_size, front):
    """Its double backward enters the layers at their inputs, and needs the experts' parameters there."""
    plain, model = mixture(front)

    def penalised(net: nn.Module, of: int) -> torch.Tensor:
        x, wanted = batch_of(of, 0)[0].requires_grad_(), [[0], [1] if of else [], [2, 1]]
        loss = net(x, wanted)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with torch.inference_mode():
            net(x.detach(), wanted)
        return loss + slope.square().sum()

    penalised(model, rank).backward()
    mean_backward(partial(penalised, plain))
    assert_close_grads(model, plain, **CLOSE)


@each_front
@ranks(2)
def test_what_no_rank_runs_has_no_gradient_and_is_gathered_once_a_pass(rank, world_size, front):
    _, model = mixture(front)
    with record_events() as events:
        model(batch_of(rank, 0)[0], [[rank], [0], []]).backward()
    gathers = Counter(event.unit for event in events if event.kind is EventKind.UNSHARD)
    reductions = Counter(event.unit for event in events if event.kind is EventKind.REDUCE)
    experts = [f"layers.{n}.experts.{index}" for n in range(3) for index in range(3)]
    assert {gathers[expert] for expert in experts} == {2}
    assert {reductions[expert] for expert in experts} == {1}
    used = {name for name, grad in full_grads(model).items() if grad.count_nonzero()}
    expected = {f"layers.{n}.experts.{index}.up.weight" for n, index in ((0, 0), (0, 1), (1, 0))}
    assert {name for name in used if name.endswith("up.weight")} == expected
    skipped = [
        p
        for name, p in model.named_parameters()
        if "layers.2.experts" in name.replace("_fsdp_wrapped_module.", "")
    ]
    assert skipped and all(param.grad is None for param in skipped)


@ranks(2)
def test_what_cannot_be_skipped_is_refused(rank, world_size):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

    tied = Tied()
    fully_shard(tied.one)
    fully_shard(tied.two)
    fully_shard(tied)
    listed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([listed[0], listed[1]])
    fully_shard(listed)
    shared = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    shared[1][0] = shared[0][0]
    wrapped = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(nn.Linear(4, 4))))
    for module in (shared[0][0], *shared):
        fully_shard(module)
    cases: list[tuple[Any, type[Exception], str]] = [
        (3, TypeError, "takes a module, not a int"),
        (tied, ValueError, "is the root, or no unit around it has parameters of its own"),
        (tied.own, ValueError, "this Linear is no unit and has none below it"),
        (wrapped.module[1].module, ValueError, "this Linear is no unit and has none below it"),
        (tied.two, ValueError, "unit 'two' and unit 'one' share tied parameters"),
        (tied.one, ValueError, "unit 'one' and unit 'two' share tied parameters"),
        (listed[0], ValueError, "was made of a list of modules"),
        (shared[0][0], ValueError, "neither inside the other"),
    ]
    for module, kind, told in cases:
        with pytest.raises(kind, match=told):
            allow_skipping(module)
    _, model = mixture("orig")
    with pytest.raises(RuntimeError, match="runs only inside the forward of unit 'layers.0'"):
        inner(inner(model).layers[0]).experts[0](torch.ones(1, WIDTH, dtype=torch.float64))
    for name, param in model.named_parameters():
        param.requires_grad_("experts" in name)
    x, _ = batch_of(rank, 0)
    with pytest.raises(RuntimeError, match="no output of unit 'layers.0' needs a gradient"):
        model(x, [[], [], []])
    model(x, [[0], [rank], []]).backward()
