"""`step_of`: a training step with several batches, for a `setup` of `plan` and `fit`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    accumulation: int = 1,
    *,
    sync: str = "last",
) -> Callable[[], None]:
    """Returns a training step: `accumulation` forwards and backwards, and one step of the optimizer.

    Args:
        model: A model that is sharded or wrapped.
        optimizer: The optimizer of its parameters.
        loss: Makes a batch and returns its loss, a scalar.
        accumulation: How many batches make a step.
        sync: Gradients are reduced in the "last" backward, and until then whole ones add up on each rank; or
            in "every" one, which takes less memory and more communication.

    Raises:
        ValueError: If `accumulation` is no positive number, or `sync` is another word.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation must be at least 1, not {accumulation}")
    if sync not in ("last", "every"):
        raise ValueError(f"sync must be 'last' or 'every', not {sync!r}")

    def step() -> None:
        for part in range(accumulation):
            is_last = part == accumulation - 1
            with _reducing(model, is_last or sync == "every"):
                part_of_loss: Any = loss() / accumulation
                part_of_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _reducing(model: nn.Module, reduces: bool) -> AbstractContextManager[object]:
    """Lets the backward inside reduce gradients, or only accumulate them."""
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if reduces else model.no_sync()
    sharded: Any = model
    sharded.set_requires_gradient_sync(reduces)
    return nullcontext()
