"""Low precision on a GPU: what computes in which dtype, scaling of losses, clipping."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.func import functional_call

from fronts import FRONTS, clip, full, shard
from fsdp_wrap import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Block, Transformer, loss_of, tokens
from on_cuda import on_devices, over_the_group, place_of

each_api = pytest.mark.parametrize("front", ["orig", "composable"])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A gradient that is rounded otherwise by a kernel chosen for another alignment is off by a unit or two.
CLOSE = {"bf16": 2e-3, "fp16": 3e-4}


def _mixed(front, module, dtype, offload):
    if front != "composable":
        policy = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        return shard(
            front, module, WRAPPINGS["block"](), mixed_precision=policy, cpu_offload=CPUOffload(offload)
        )
    low = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*(part for part in module.modules() if isinstance(part, Block)), module):
        fully_shard(part, mp_policy=low, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    return module


def _by_hand(plain, dtype, batch):
    """The loss of a model whose parameters are cast, each for itself."""
    cast = {name: param.to(dtype) for name, param in plain.named_parameters()}
    output = functional_call(plain, cast, batch[:, :-1])
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("alone", [True, False], ids=["copies", "group"])
@each_api
@on_devices
def test_training_equals_training_by_hand(rank, world_size, device, front, alone, offload):
    for name in DTYPES:
        with over_the_group(not alone):
            _compare_with_training_by_hand(rank, world_size, place_of(device, rank), front, name, offload)


def _compare_with_training_by_hand(rank, world_size, place, front, name, offload):
    dtype = DTYPES[name]
    torch.manual_seed(0)
    plain = Transformer().to(place)
    model = _mixed(front, copy.deepcopy(plain), dtype, offload)
    seen = set()
    model.blocks[0].mlp[0].register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        batches = [tokens(each, step).to(place) for each in range(world_size)]
        expected = sum(_by_hand(plain, dtype, each) for each in batches) / world_size
        loss = loss_of(model, batches[rank])
        for optimizer, each in zip(optimizers, (expected, loss)):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}
    assert seen == {dtype}
    _assert_same(model, plain, atol=CLOSE[name])


def _assert_same(model, plain, **tolerance):
    state = model.state_dict()
    for name, param in plain.named_parameters():
        found = full(state[name].to(param.device))
        torch.testing.assert_close(found, param.detach(), rtol=0, msg=name, **tolerance)


@each_api
@on_devices
def test_scaler_follows_torch(rank, world_size, device, front):
    """Also after a step whose gradients overflow on one rank: nobody takes it, and the scale goes down."""
    place = place_of(device, rank)
    torch.manual_seed(0)
    plain = Transformer().to(place)
    model = shard(front, copy.deepcopy(plain), WRAPPINGS["block"]())
    kinds = (GradScaler(device, init_scale=2.0**10), ShardedGradScaler(device, init_scale=2.0**10))
    for overflows in (False, True):
        for each, scaler in zip((plain, model), kinds):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                sharded = each is model
                batches = [tokens(rank if sharded else other, step).to(place) for other in range(world_size)]
                losses = [loss_of(each, batch) for batch in batches[: 1 if sharded else None]]
                loss = sum(losses) / len(losses)
                if overflows and step == 1 and rank == 0:
                    loss = loss * torch.full((), float("inf"), device=place)
                scaler.scale(loss).backward()  # type: ignore[arg-type]
                if not sharded and overflows and step == 1 and rank != 0:
                    next(each.parameters()).grad.fill_(float("inf"))
                scaler.step(optimizer)
                scaler.update()
        assert kinds[0].get_scale() == kinds[1].get_scale() == 2.0 ** (9 if overflows else 10)
        _assert_same(model, plain, atol=1e-5)


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@each_api
@on_devices
def test_clipping_equals_torch(rank, world_size, device, front, offload):
    place = place_of(device, rank)
    torch.manual_seed(0)
    plain = Transformer().double().to(place)
    model = shard(front, copy.deepcopy(plain), WRAPPINGS["block"](), cpu_offload=CPUOffload(offload))
    for step, norm_type in enumerate((1.0, 2.0, float("inf"))):
        for each in (plain, model):
            each.zero_grad()
        losses = [loss_of(plain, tokens(each, step).to(place)) for each in range(world_size)]
        (sum(losses) / world_size).backward()
        loss_of(model, tokens(rank, step).to(place)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        found = clip(model, 0.5, norm_type)
        torch.testing.assert_close(found.to(place), expected, rtol=1e-9, atol=0)
        for module in (plain, model):
            torch.optim.SGD(module.parameters(), lr=1.0).step()
        _assert_same(model, plain, atol=1e-10)


class _Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.arange(16).to(dtype), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale.to(x.dtype)


@on_devices
def test_frozen_parameters_that_nccl_does_not_know(rank, world_size, device):
    """They travel as bytes."""
    place = place_of(device, rank)
    torch.manual_seed(0)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16):
        plain = _Scaled(dtype).to(place)
        with over_the_group():
            for front in FRONTS:
                model = shard(front, copy.deepcopy(plain))
                x = torch.rand(3, 16, device=place)
                torch.testing.assert_close(model(x), plain(x))
