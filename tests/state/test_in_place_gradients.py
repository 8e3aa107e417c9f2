"""Gradients that take the memory of their parameters (`set_gradients_in_place`)."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.memory import Peak, live_bytes
from fronts import assert_same_grads, assert_same_values, full_grads, no_sync, shard, twins
from fsdp_wrap import MixedPrecision, set_gradients_in_place
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, loss_of, tokens, train

wrapper_fronts = pytest.mark.parametrize("front", ["flat", "orig"])


@pytest.mark.parametrize(
    ("front", "wrapping"),
    [("flat", "whole"), ("orig", "block"), ("composable", "whole"), ("composable", "block")],
)
@ranks(2)
def test_training_is_bit_equal_to_ddp(rank, world_size, front, wrapping):
    plain, wrapped = twins(front, Transformer, auto_wrap_policy=WRAPPINGS[wrapping]())
    set_gradients_in_place(wrapped)
    ddp = DDP(plain)
    for model in (ddp, wrapped):
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        with no_sync(model) if model is wrapped else ddp.no_sync():
            loss_of(model, tokens(rank, 2)).backward()
        loss_of(model, tokens(rank, 3)).backward()
        optimizer.step()
        train(model, optimizer, rank, range(4, 6))
    assert_same_values(wrapped, ddp)


class _SharedInside(nn.Module):
    """A unit whose layer gets a gradient from each of two backwards inside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@wrapper_fronts
@ranks(2)
def test_a_second_gradient_in_one_backward_is_noticed(rank, world_size, front):
    plain, wrapped = twins(front, _SharedInside, torch.float64)
    set_gradients_in_place(wrapped)
    x = torch.full((2, 8), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="'layer.(weight|bias)' got a second gradient"):
        wrapped(x).sum().backward()
    wrapped.zero_grad()
    set_gradients_in_place(wrapped, enabled=False)
    wrapped(x).square().sum().backward()
    (sum(plain(torch.full_like(x, r + 1.0).requires_grad_()).square().sum() for r in range(2)) / 2).backward()
    assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_mixed_dtypes_and_frozen_parameters_take_what_way_they_can(rank, world_size):
    def make() -> nn.Module:
        model = Transformer()
        model.blocks[1].requires_grad_(False)
        return model

    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mixed in (MixedPrecision(), policy):
        _, wrapped = twins("orig", make, auto_wrap_policy=WRAPPINGS["block"](), mixed_precision=mixed)
        _, usual = twins("orig", make, auto_wrap_policy=WRAPPINGS["block"](), mixed_precision=mixed)
        set_gradients_in_place(wrapped)
        for model in (wrapped, usual):
            loss_of(model, tokens(rank, 0)).backward()
        found, expected = full_grads(wrapped), full_grads(usual)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class _Halves(nn.Module):
    """A unit of equal parameters, whose gradients come one after the other.

    Of 4 MiB: over gloo, tensors of less than 4 MB are reduced by way of a second one of their size.
    """

    WIDTH = 512

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


UNITS = 4


@pytest.mark.slow
@wrapper_fronts
@ranks(2)
def test_a_unit_of_memory_less(rank, world_size, front):
    """The last but one unit, beside all shards: in place two units and one more gradient, else three."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "0"  # which would hold what travels once more
    gc.collect()
    before = live_bytes()  # of earlier tests
    model = shard(front, nn.Sequential(*(_Halves() for _ in range(UNITS))), ModuleWrapPolicy({_Halves}))
    unit = 4 * _Halves.WIDTH**2 * 4
    held = before + 2 * UNITS * unit / world_size
    peaks = []
    for in_place in (False, True):
        set_gradients_in_place(model, in_place)
        model(torch.ones(1, _Halves.WIDTH)).sum().backward()
        model.zero_grad()
        loss = model(torch.ones(1, _Halves.WIDTH)).sum()
        with Peak(held + 2.1 * unit) as peak:
            loss.backward()
        peaks.append((peak.value - held) / unit)
    assert 1.9 < peaks[0] <= 2.1  # 3, without the gradients of two units that are not there yet
    assert peaks[1] <= 1.8


def test_a_module_without_units_is_refused():
    with pytest.raises(ValueError, match="Linear has no wrapped or sharded module"):
        set_gradients_in_place(nn.Linear(2, 2))
