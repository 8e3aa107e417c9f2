"""Stochastic rounding that does not depend on the ranks; state with an entry for each row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bed import ranks
from fronts import FRONTS, full, full_state
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.optim import stochastic_rounding
from fsdp_wrap.optim._stochastic_rounding import draws_of, rounded

# stochastic rounding


def test_rounding_is_to_neighbours_and_right_in_the_mean():
    values = torch.tensor([1.0 + 2**-9, -3.0 - 2**-8, 1e-40, 2.5, 0.0, torch.inf, -torch.inf])
    draws = torch.arange(65536, dtype=torch.int32).view(-1, 1).expand(-1, values.numel())
    found = rounded(values.expand(65536, -1), draws).double()
    assert torch.equal(found.mean(0), values.double())  # every draw once: exact
    assert [column.unique().numel() for column in found.T] == [2, 2, 2, 1, 1, 1, 1]
    assert torch.isnan(rounded(torch.tensor([torch.nan]), draws[-1:, 0])).all()


def test_draws_are_of_the_index_and_even():
    keys = (123456789, 987654321)
    whole = draws_of(keys, 0, 1 << 16, torch.device("cpu"))
    assert torch.equal(draws_of(keys, 40000, 100, torch.device("cpu")), whole[40000:40100])
    counts = torch.bincount(whole >> 8, minlength=256).double()
    assert (counts - 256).abs().max() < 6 * 16  # 6 standard deviations
    pairs = torch.stack([whole[:-1], whole[1:]]).double()
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.02
    others = draws_of((keys[0] + 1, keys[1]), 0, 1 << 16, torch.device("cpu"))
    assert (others == whole).sum() < 20
    beyond = draws_of(keys, 1 << 32, 1 << 10, torch.device("cpu"))
    assert (beyond == whole[: 1 << 10]).sum() < 20


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)).to(torch.bfloat16)


def sharded(front: str, group: Any = None, **options: Any) -> Any:
    model = net()
    if front == "composable":
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        return fully_shard(model, mesh=mesh, **options)
    return FSDP(model, process_group=group, use_orig_params=front == "orig", **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same batch: means of 1, 2 and 4 gradients have the bits of each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(3, 6, generator=generator).to(torch.bfloat16)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    expected = full_state(plain)
    for name, value in full_state(model).items():
        assert torch.equal(value, expected[name]), name


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return stochastic_rounding(torch.optim.AdamW(model.parameters(), lr=1e-3, **options), model, seed=5)


@ranks(4)
def test_bits_do_not_depend_on_ranks_or_front_end(rank, world_size):
    plain = net()
    train(plain, adamw(plain), range(4))
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 4)}
    for size, group in groups.items():
        for front in FRONTS if rank < size else ():
            model = sharded(front, group)
            train(model, adamw(model, foreach=front == "orig"), range(4))
            assert_same(model, plain)
    nearest = net()
    train(nearest, torch.optim.AdamW(nearest.parameters(), lr=1e-3), range(4))
    assert not torch.equal(nearest[0].weight, plain[0].weight)
    other = net()
    train(other, stochastic_rounding(torch.optim.AdamW(other.parameters(), lr=1e-3), other), range(4))
    assert not torch.equal(other[0].weight, plain[0].weight)  # another seed


@ranks(2)
def test_draws_go_on_where_a_state_dict_is_loaded(rank, world_size):
    for front in FRONTS:
        model = sharded(front)
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, range(2, 4))
        again = sharded(front)
        again.load_state_dict(weights)
        resumed = adamw(again)
        resumed.load_state_dict(saved)
        state = next(iter(resumed.state.values()))
        assert full(state["exp_avg"]).dtype == torch.float32
        train(again, resumed, range(2, 4))
        assert_same(again, model)


def test_what_cannot_round_is_refused():
    model = net()
    itself = torch.optim.SGD(model.parameters())
    itself.bf16_stochastic_round = True  # type: ignore[attr-defined]
    cases: list[tuple[Any, type[Exception], str]] = [
        (model, TypeError, "stochastic_rounding takes a torch.optim.Optimizer"),
        (torch.optim.Adafactor(model.parameters()), ValueError, "Adafactor computes with whole parameters"),
        (torch.optim.SGD(net().parameters()), ValueError, "not one of the model's"),
        (adamw(model), ValueError, "rounds stochastically already"),
        (itself, ValueError, "bf16_stochastic_round=False"),
    ]
    for optimizer, error, rule in cases:
        with pytest.raises(error, match=rule):
            stochastic_rounding(optimizer, model)
