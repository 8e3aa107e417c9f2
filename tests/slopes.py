"""Micro-batches that need gradients of inputs besides those of parameters, for any model of `net`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

Backward = Callable[[torch.Tensor], None]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)
    )


def example(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs, which need gradients, and targets."""
    random = torch.Generator().manual_seed(100 * rank + number)
    x, y = (torch.randn(5, size, generator=random, dtype=torch.float64) for size in (4, 3))
    return x.requires_grad_(), y


def penalize(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    backward(F.mse_loss(output, y) + slope.square().mean())


def curve(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
    """Multiplies a Hessian with a vector."""
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    backward(F.mse_loss(output, y) + bend.square().mean())


def attack(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
    """Trains with inputs that a first backward has made worse."""
    F.mse_loss(model(x), y).backward(inputs=[x])
    backward(F.mse_loss(model((x + 0.1 * x.grad.sign()).detach()), y))


def attack_frozen(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
    model.requires_grad_(False)
    F.mse_loss(model(x), y).backward()
    model.requires_grad_(True)
    backward(F.mse_loss(model((x + 0.1 * x.grad.sign()).detach()), y))


def explain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, backward: Backward) -> None:
    """Ends with a backward that adds to no parameter."""
    backward(F.mse_loss(model(x), y))
    torch.autograd.grad(model(x).square().sum(), x)


SLOPES = {function.__name__: function for function in (penalize, curve, attack, attack_frozen, explain)}


def sum_backwards(plain: nn.Module, name: str, weights: dict[tuple[int, int], float]) -> None:
    """Adds the weighted mean over micro-batches, by rank and number, to the gradients of a plain model."""
    for place, weight in weights.items():
        share = weight / sum(weights.values())
        SLOPES[name](plain, *example(*place), partial(_scaled_backward, share))


def _scaled_backward(share: float, loss: torch.Tensor) -> None:
    (loss * share).backward()
