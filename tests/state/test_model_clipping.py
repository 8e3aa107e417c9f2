"""`fsdp_wrap.clip_grad_norm_` and `fsdp_wrap.grad_norms` of a model, for both front-ends."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_wrap
import tp_nets
from bed import ranks
from fronts import each_front, full, full_grads, full_state, shard
from fsdp_wrap import fully_shard, replicate
from fsdp_wrap.wrap import ModuleWrapPolicy

NORMS = (1.0, 2.0, math.inf)


class Layer(nn.Module):
    """Of parameters that two ranks cannot cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.Linear(3, 1)).double()


def losses(model: nn.Module, seeds: range) -> torch.Tensor:
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        found.append(model(torch.rand(2, 3).double()).square().sum())
    return torch.stack(found).mean()


def expected_norms(plain: nn.Module, p: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """By name, and of all."""
    norms = {name: torch.linalg.vector_norm(each.grad, p) for name, each in plain.named_parameters()}
    return norms, torch.linalg.vector_norm(torch.stack([*norms.values()]), p)


class _NoDTensors(TorchDispatchMode):
    """Refuses operators on DTensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert DTensor not in types, func
        return func(*args, **(kwargs or {}))


@ranks(2)
@each_front
def test_norms_and_clipped_gradients_are_those_of_a_plain_model(rank, world_size, front):
    for p in NORMS:
        plain, model = net(), shard(front, net(), ModuleWrapPolicy({Layer}))
        losses(plain, range(world_size)).backward()
        losses(model, range(rank, rank + 1)).backward()
        by_name, total = expected_norms(plain, p)
        with _NoDTensors():
            found = fsdp_wrap.grad_norms(model, p)
            clipped = fsdp_wrap.clip_grad_norm_(model, 0.5 * total.item(), p)
        torch.testing.assert_close(clipped, total, rtol=1e-10, atol=0)
        torch.testing.assert_close(found, by_name, rtol=1e-10, atol=1e-14)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5 * total.item(), p)
        grads = full_grads(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12)


@ranks(2)
def test_gradients_of_some_parameters_that_were_replaced_or_are_not_there(rank, world_size):
    plain, model = net(), net()
    for each in model:
        fully_shard(each)
    fully_shard(model)
    losses(plain, range(world_size)).backward()
    losses(model, range(rank, rank + 1)).backward()
    for each in (plain, model):
        each[0].up.bias.grad = None
        each[1].up.weight.grad = each[1].up.weight.grad * 2
    total = fsdp_wrap.clip_grad_norm_(model, 1e-3)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
    assert "0.up.bias" not in fsdp_wrap.grad_norms(model)
    for param, same in zip(plain.parameters(), model.parameters()):
        assert (param.grad is None) == (same.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(full(same.grad), param.grad, rtol=1e-9, atol=1e-12)


@ranks(2)
def test_replicated_and_plain_modules_count_once(rank, world_size):
    plain, model = net(), net()
    fully_shard(model[0])
    replicate(model[1])  # and the last belongs to nobody
    losses(plain, range(world_size)).backward()
    losses(model, range(rank, rank + 1)).backward()
    for param, same in zip(plain[2].parameters(), model[2].parameters()):
        same.grad.copy_(param.grad)
    by_name, total = expected_norms(plain, 2.0)
    torch.testing.assert_close(fsdp_wrap.grad_norms(model), by_name, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1e-3), total, rtol=1e-10, atol=0)


@ranks(4)
def test_parameters_of_tensor_parallelism_in_a_unit_or_in_none(rank, world_size):
    _, data, tensor = tp_nets.mesh_of("flat")
    plain, model = tp_nets.net(), tp_nets.parallelize(tp_nets.net(), tensor, "columns")
    fully_shard(model.blocks[0], mesh=data)
    batch = tp_nets.batches(1, 0)[0]
    tp_nets.loss_of(plain, batch)
    tp_nets.loss_of(model, batch)
    for p in NORMS:
        by_name, total = expected_norms(plain, p)
        torch.testing.assert_close(fsdp_wrap.grad_norms(model, p), by_name, rtol=1e-10, atol=1e-14)
        found = fsdp_wrap.clip_grad_norm_(model, 2 * total.item(), p)
        torch.testing.assert_close(found, total, rtol=1e-10, atol=0)


@pytest.mark.parametrize("front", ["orig", "composable"])
@ranks(2)
def test_a_norm_that_is_not_finite_is_refused_if_asked(rank, world_size, front):
    model = shard(front, net(), ModuleWrapPolicy({Layer}))
    losses(model, range(rank, rank + 1)).backward()
    if rank == 0:
        next(param for param in model.parameters() if param.grad is not None).grad.mul_(math.inf)
    before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="cannot be clipped; leave out error_if_nonfinite"):
        fsdp_wrap.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    for param, same in zip(model.parameters(), before):
        if same is not None:
            torch.testing.assert_close(full(param.grad), full(same), rtol=0, atol=0, equal_nan=True)
    assert not fsdp_wrap.clip_grad_norm_(model, 1.0).isfinite()


def test_plain_models_and_wrong_uses():
    plain, model = net(), net()
    for each in (plain, model):
        losses(each, range(1)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1e-3), expected)
    for param, same in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(same.grad, param.grad)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        fsdp_wrap.clip_grad_norm_(model, -1.0)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        fsdp_wrap.clip_grad_norm_(model, 1.0, 0.0)
    with pytest.raises(ValueError, match="Sequential has no wrapped or sharded module"):
        fsdp_wrap.grad_norms(model)
    with pytest.raises(TypeError, match="takes a model, not a list"):
        fsdp_wrap.grad_norms([])  # type: ignore[arg-type]


class _Mixed(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).to(torch.complex128) @ self.weight).abs()


@each_front
@ranks(2)
def test_norms_of_complex_gradients(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.Sequential(_Mixed(), nn.Linear(5, 1).double()).double()
    model = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({_Mixed}))
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for p in (0.5, *NORMS):
        for module in (plain, model):
            module.zero_grad()
            module(torch.ones(2, 3).double()).square().sum().backward()
        named, total = expected_norms(plain, p)
        close(fsdp_wrap.grad_norms(model, p), named)
        found = fsdp_wrap.clip_grad_norm_(model, 0.1, p)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
        close(found, total)
        for name, param in plain.named_parameters():
            close(full_grads(model)[name], param.grad)


class _Empty(nn.Module):
    """Parameters without elements, as of an expert or a layer that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows.sum() + self.columns.sum()


@pytest.mark.parametrize(
    ("front", "together"), [("flat", None), ("orig", 0), ("composable", None), ("composable", 0)]
)
@ranks(2)
def test_units_without_elements(rank, world_size, front, together):
    """They are trained, clipped, saved and loaded beside others."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), _Empty(), nn.Linear(3, 1)).double()
    model = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({_Empty}), travel_together_bytes=together)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, model)]
    for _ in range(3):
        for module, optimizer in zip((plain, model), optimizers):
            module(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()
        found = fsdp_wrap.grad_norms(model)  # with original parameters, empty slices have no gradients
        norms = {name: torch.linalg.vector_norm(each.grad) for name, each in plain.named_parameters()}
        norms = {name: norm for name, norm in norms.items() if name in found or not name.startswith("1.")}
        torch.testing.assert_close(found, norms)
        total = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1.0), total)
    model.load_state_dict(model.state_dict())
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])
