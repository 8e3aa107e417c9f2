"""The same bits at any number of ranks: parameters, optimizer state and norms, however it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import fsdp_wrap
from bed import ranks, run_isolated, run_ranks
from beside import assert_close_grads
from composable import shard_blocks
from fronts import each_front, full, shard, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import (
    MixedPrecision,
    ShardingStrategy,
    checkpoint,
    clip_grad_norm_,
    grad_norms,
    iter_full_optim_state,
)
from fsdp_wrap.optim import Muon
from fsdp_wrap.wrap import NameWrapPolicy
from models import WRAPPINGS, Block, Transformer, loss_of, tokens
from slopes import SLOPES, example, sum_backwards
from slopes import net as slope_net

MICRO_BATCHES = 12
"""A multiple of 1, 2, 3, 4 and 6, which is no power of two."""


class Dropped(Transformer):
    """Draws random numbers in each block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1)
        return self.head(self.norm(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Dropped(blocks=1)


def mesh_of(size: int, replicas: int) -> DeviceMesh:
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(way: str, size: int) -> nn.Module:
    """Makes a model by a front-end, and a strategy, number of replicas or precision behind a colon."""
    front, _, option = way.partition(":")
    if front == "composable":
        return shard_blocks(net(), mesh=mesh_of(size, int(option or 1)))
    options: dict[str, Any] = {"shared_memory": option != "gloo"}
    if option.isdigit():
        options |= {
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
            "device_mesh": mesh_of(size, int(option)),
        }
    elif option in ShardingStrategy.__members__:
        options["sharding_strategy"] = ShardingStrategy[option]
    elif option == "bf16":
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16)
    elif option == "wide":
        options["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    elif option == "fp16":
        options["mixed_precision"] = MixedPrecision(torch.float32, reduce_dtype=torch.float16)
    return shard(front, net(), WRAPPINGS["block"](), **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model, lr=1e-2, select=lambda name, shape: name.startswith("blocks") and len(shape) == 2)


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in model.state_dict().items():
        yield name, full(value)
    if isinstance(model, FSDP):
        values = ((name, key, value) for name, key, value in iter_full_optim_state(model, optimizer))
    else:
        states = ((name, optimizer.state[param]) for name, param in model.named_parameters())
        values = ((name, key, value) for name, state in states for key, value in state.items())
    own: list[tuple[str, torch.Tensor]] = [
        (f"{name} {key}", full(value).clone())
        for name, key, value in values
        if isinstance(value, torch.Tensor)
    ]
    yield from sorted(own, key=lambda named: named[0])


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for name, value in state_of(model, optimizer):
        hashed.update(name.encode())
        hashed.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def steps_of(model: nn.Module, work: Any, optimizer: Any, steps: range, norm: float) -> Iterator[str]:
    for step in steps:
        for index in work.micro_batches(step):
            loss_of(model, tokens(index, step)).backward()
        if step == 0:  # two collectives for each parameter
            yield from (f"{name} {value.item().hex()}" for name, value in grad_norms(model, norm).items())
        yield clip_grad_norm_(model, 0.5, norm).item().hex()
        optimizer.step()
        optimizer.zero_grad()


class How(NamedTuple):
    """How a model is trained."""

    steps: int = 2
    micro_batches: int = MICRO_BATCHES
    optimizer: str = "adamw"
    norm: float = 2.0


USUAL = How()


def trained(rank: int, size: int, ways: Iterable[str], how: How) -> dict[str, str]:
    """Trains a model in each way; returns the norms and a digest of all values of each."""
    torch.set_num_threads(1)
    by_way = {}
    for way in ways:
        model = sharded(way, size)
        work = fsdp_wrap.reproducible(model, micro_batches=how.micro_batches)
        optimizer = OPTIMIZERS[how.optimizer](model)
        norms = [*steps_of(model, work, optimizer, range(how.steps), how.norm)]
        by_way[way] = " ".join([*norms, digest(model, optimizer)])
    return by_way


def outcomes(size: int, *ways: str, how: How = USUAL) -> set[str]:
    """Returns the different outcomes of some ways on so many ranks."""
    every = run_ranks(size, trained, ways, how)
    assert all(outcome == every[0] for outcome in every), every
    return set(every[0].values())


def test_every_way_has_the_bits_of_one_rank():
    expected = outcomes(1, "orig")
    assert outcomes(2, "flat", "composable", "orig:gloo", "orig:NO_SHARD") == expected
    assert outcomes(4, "orig", "composable:2") == expected
    assert outcomes(3, "flat") == expected


def test_reductions_in_other_dtypes():
    how = How(steps=1)
    for option in ("bf16", "wide", "fp16"):
        assert outcomes(2, f"orig:{option}", how=how) == outcomes(1, f"orig:{option}", how=how)


@pytest.mark.slow
def test_many_ways():
    how = How(micro_batches=24)
    expected = outcomes(1, "flat", "orig", "composable", how=how)
    assert len(expected) == 1
    assert outcomes(2, "flat:2", "orig:SHARD_GRAD_OP", "composable:2", how=how) == expected
    assert outcomes(3, "orig", "composable", "flat:NO_SHARD", how=how) == expected
    assert outcomes(4, "flat:2", "orig:4", "orig:SHARD_GRAD_OP", how=how) == expected
    six = run_isolated(trained, ("orig:2", "composable:3"), how, world_size=6)
    assert set().union(*(end.value.values() for end in six)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1.0, float("inf")])
def test_other_norms(norm):
    how = How(norm=norm)
    assert outcomes(4, "flat", "composable:2", how=how) == outcomes(1, "orig", how=how)


def test_muon():
    how = How(micro_batches=4, optimizer="muon")
    expected = outcomes(1, "orig", how=how)
    assert outcomes(2, "orig", "composable", how=how) == expected


def saved(rank: int, size: int, way: str, folder: Path) -> None:
    torch.set_num_threads(1)
    model = sharded(way, size)
    work, optimizer = fsdp_wrap.reproducible(model, micro_batches=MICRO_BATCHES), adamw(model)
    list(steps_of(model, work, optimizer, range(1), 2.0))
    checkpoint.save(folder, model, optimizer, step=1)


def resumed(rank: int, size: int, way: str, folder: Path) -> str:
    torch.set_num_threads(1)
    model = sharded(way, size)
    work, optimizer = fsdp_wrap.reproducible(model, micro_batches=MICRO_BATCHES), adamw(model)
    assert checkpoint.load(folder, model, optimizer).step == 1
    norms = [*steps_of(model, work, optimizer, range(1, 2), 2.0)]
    return " ".join([*norms, digest(model, optimizer)])


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path):
    run_ranks(4, saved, "orig", tmp_path)
    (expected,) = outcomes(1, "orig")
    for outcome in run_ranks(2, resumed, "flat", tmp_path):
        assert expected.endswith(outcome)


def mean_gradients(rank: int, size: int) -> None:
    """Compares with plain sums, in float64: the tree must not only be the same, but right."""
    plain = Transformer(blocks=2).double()
    torch.manual_seed(0)
    model = shard("orig", Transformer(blocks=2).double(), WRAPPINGS["block"]())
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    work = fsdp_wrap.reproducible(model, micro_batches=6)
    for index in work.micro_batches(0):
        loss_of(model, tokens(index, 0)).backward()
    for index in range(6):
        (loss_of(plain, tokens(index, 0)) / 6).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-11, atol=0)
    own = dict(plain.named_parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            grad = own[name.replace("_fsdp_wrapped_module.", "")].grad
            torch.testing.assert_close(param.grad, grad, rtol=1e-9, atol=1e-13)
    assert isinstance(model.blocks[0].module, Block)


def test_gradients_are_the_mean_of_all_micro_batches():
    run_ranks(3, mean_gradients)


@pytest.mark.parametrize("name", SLOPES)
@each_front
@ranks(2)
def test_backwards_for_inputs_alone_do_not_count(rank, world_size, front, name):
    """Also between the last backward of a step and `zero_grad`, where gradients are complete."""
    plain, model = twins(front, slope_net, torch.float64, auto_wrap_policy=NameWrapPolicy("Sequential"))
    work = fsdp_wrap.reproducible(model, micro_batches=4)
    for step in range(2):
        for net in (plain, model):
            net.zero_grad()
        for index in work.micro_batches(step):
            SLOPES[name](model, *example(index, step), lambda loss: loss.backward())
        torch.autograd.grad(model(x := example(rank, 9)[0]).square().sum(), x)
        sum_backwards(plain, name, {(index, step): 1.0 for index in range(4)})
        assert_close_grads(model, plain, rtol=0, atol=1e-12)
