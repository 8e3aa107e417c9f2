"""A sharded model beside a plain one, of which each rank trains its own on a batch of its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fronts import full_grads
from nets import WIDTH


def batch_of(rank: int, number: int = 0, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(3, width, dtype=torch.float64, generator=generator)


def losses(plain: nn.Module, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plain(batch).square().sum(), model(batch).square().sum()


def zero(*modules: nn.Module) -> None:
    for module in modules:
        module.zero_grad()


def assert_mean_gradients(plain: nn.Module, model: nn.Module, told: Any = "", **tolerance: Any) -> None:
    """Gradients are the means of those that the ranks' plain models have, zeros where there is none."""
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(grad)
        said = f"{told} {name}: {{}}".format
        torch.testing.assert_close(grads[name], grad / dist.get_world_size(), msg=said, **tolerance)


def step_beside(plain: nn.Module, model: nn.Module, rank: int, told: Any = "") -> None:
    zero(plain, model)
    for loss in losses(plain, model, batch_of(rank)):
        loss.backward()
    assert_mean_gradients(plain, model, told)
