"""Gradients of sharded models beside those of plain ones, which see the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fronts import full_grads


def mean_backward(loss_of_rank: Callable[[int], torch.Tensor]) -> None:
    """The backward of a plain model's loss, averaged over the batches of all ranks."""
    size = dist.get_world_size()
    (sum(loss_of_rank(rank) for rank in range(size)) / size).backward()  # type: ignore[union-attr]


def assert_close_grads(model: nn.Module, plain: nn.Module, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Full gradients are a plain model's, and zeros where that has none."""
    found = full_grads(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        torch.testing.assert_close(found[name], expected, msg=f"{name}: {{}}".format, rtol=rtol, atol=atol)
