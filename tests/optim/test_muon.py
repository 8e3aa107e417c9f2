"""`Muon` of sharded models beside torch's own on a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fronts
from bed import ranks
from fsdp_wrap.optim import Muon
from fsdp_wrap.wrap import ModuleWrapPolicy

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class Layer(nn.Module):
    """Matrices of which two ranks cannot have equal parts, and what is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


POLICY = ModuleWrapPolicy({Layer})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def backward(model: nn.Module, at: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * at + rank)
    tokens = torch.randint(11, (3, 5), generator=generator)
    model(tokens).square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    optimizer.zero_grad()
    backward(model, at, dist.get_rank())
    optimizer.step()


def in_float64(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """What torch's Newton-Schulz iteration does, in float64 and by powers of the Gram matrix."""
    a, b, c = coefficients
    x = grad.double() / max(grad.double().norm().item(), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = (a * torch.eye(len(x), dtype=x.dtype) + b * gram + c * gram @ gram) @ x
    return x


class Plain:
    """Torch's own Muon and SGD on a plain model, which sees the batches of all ranks."""

    def __init__(self, model: nn.Module, exact: bool = True, **options: Any) -> None:
        self.model, self._exact = model, exact
        embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
        params = [*model.parameters()]
        matrices = [each for each in params if each.dim() == 2 and id(each) not in embeddings]
        chosen = {*map(id, matrices)}
        self.muon = torch.optim.Muon(matrices, **{**OPTIONS, **options})
        self.other = sgd([each for each in params if id(each) not in chosen])

    def step(self, at: int) -> None:
        self.muon.zero_grad()
        self.other.zero_grad()
        size = dist.get_world_size()
        for rank in range(size):
            backward(self.model, at, rank)
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad /= size
        own = torch.optim._muon._zeropower_via_newtonschulz
        torch.optim._muon._zeropower_via_newtonschulz = in_float64 if self._exact else own
        self.muon.step()
        torch.optim._muon._zeropower_via_newtonschulz = own
        self.other.step()


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in fronts.full_state(model).items()}


def assert_equal(model: nn.Module, plain: nn.Module, atol: float = 1e-10) -> None:
    found = full_values(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


def muon(model: nn.Module, **options: Any) -> Muon:
    return Muon(model, **{**OPTIONS, "other": sgd, "ns_dtype": torch.float64, **options})


@fronts.each_front
@ranks(1, 2, 3, 4)
def test_numbers_are_torchs_in_float64(rank, world_size, front):
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=POLICY)
    reference, optimizer = Plain(plain), muon(model)
    for at in range(3):
        reference.step(at)
        step(model, optimizer, at)
    assert_equal(model, plain)
