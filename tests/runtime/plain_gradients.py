"""Gradients of sharded models beside those of plain ones, which see the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fronts import full_grads
from models import loss_of, tokens


def mean_backward(loss_of_rank: Callable[[int], Any]) -> None:
    """The backward of a plain model's loss, averaged over the batches of all ranks."""
    size = dist.get_world_size()
    (sum(map(loss_of_rank, range(size))) / size).backward()


def large_batch_backward(plain: nn.Module, steps: Iterable[int]) -> None:
    """The same of all batches of tokens of some steps, for a transformer."""
    mean_backward(lambda rank: sum(loss_of(plain, tokens(rank, step)) for step in steps))


def assert_close_grads(model: nn.Module, plain: nn.Module, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Full gradients are a plain model's, and zeros where that has none."""
    found = full_grads(model)
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
        torch.testing.assert_close(found[name], expected, msg=f"{name}: {{}}".format, rtol=rtol, atol=atol)
