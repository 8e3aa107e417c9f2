"""Sharded models beside plain ones, which see the batches of all ranks: trained together, and compared."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fronts import accumulating, assert_tensors, full_grads, full_state
from models import loss_of as loss_of_tokens
from models import tokens

NEAR: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
"""How near numbers in float64 are that were computed in another order."""


def train_beside(
    model: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    batches: Callable[[int], Any],
    place: int,
    *,
    steps: int = 2,
    accumulation: str = "F",
    optimizers: tuple[Any, Any] | None = None,
    clip: Callable[[nn.Module], torch.Tensor] | None = None,
    near: dict[str, Any] = NEAR,
) -> None:
    """Trains a sharded model beside a plain one that sees the batches of all ranks; fails at any difference.

    Compared are the loss of each backward; before each step norms, gradients, how they lie, and which
    parameters have none; and all parameters in the end.

    Args:
        model: A model that any of the front-ends has sharded.
        plain: A plain model with the same values.
        loss_of: Runs forward and backward with a batch, and returns the loss.
        batches: Returns each model copy's batch, by the number of the backward.
        place: The index of this rank's batch.
        steps: How many there are.
        accumulation: How each backward of a step reduces, in the letters of `fronts.accumulating`.
        optimizers: Optimizers of the model and the plain one; SGD with momentum by default.
        clip: Clips the gradients of either model, and returns their norm.
        near: The tolerance; norms have five times as much, in relation to their size.
    """
    optimizers = optimizers or (_sgd(model), _sgd(plain))
    for step in range(steps):
        for number, letter in enumerate(accumulation):
            every = batches(10 * step + number)
            with accumulating(model, letter):
                loss = loss_of(model, every[place])
            losses = [loss_of(plain, batch) for batch in every]
            torch.testing.assert_close(loss.double(), losses[place].double(), **near)
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= len(every)
        if clip is not None:
            norms = clip(model), clip(plain)
            torch.testing.assert_close(*norms, rtol=5 * near["atol"], atol=0)
        assert_same_gradients(model, plain, near)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_tensors(full_state(model), full_state(plain), **near)


def check_each(check: Callable[[Any], None], scenarios: Iterable[Any]) -> None:
    """Checks scenarios; a failure tells of which."""
    for scenario in scenarios:
        try:
            check(scenario)
        except Exception as error:
            raise AssertionError(str(scenario)) from error


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mean_backward(loss_of_rank: Callable[[int], Any]) -> None:
    """Runs the backward of a plain model's loss, averaged over the batches of all ranks."""
    size = dist.get_world_size()
    (sum(map(loss_of_rank, range(size))) / size).backward()


def large_batch_backward(plain: nn.Module, steps: Iterable[int]) -> None:
    """Runs the same for all batches of tokens of some steps, for a transformer."""
    mean_backward(lambda rank: sum(loss_of_tokens(plain, tokens(rank, step)) for step in steps))


def assert_close_grads(model: nn.Module, plain: nn.Module, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    """Asserts that full gradients are a plain model's, and zeros where that has none."""
    expected = {name: value.to_dense() for name, value in full_grads(plain).items()}
    assert_tensors(full_grads(model), expected, rtol=rtol, atol=atol)


def assert_same_gradients(model: nn.Module, plain: nn.Module, near: dict[str, Any] = NEAR) -> None:
    """Gradients of a sharded model are those of a plain one, and are placed as the parameters are.

    Which parameters have none a wrapper does not tell: a unit's have zeros where others have some.
    """
    if not hasattr(model, "summon_full_params"):
        having = [name for name, param in model.named_parameters() if param.grad is not None]
        assert having == [name for name, param in plain.named_parameters() if param.grad is not None]
        for name, param in model.named_parameters():
            if param.grad is not None and hasattr(param, "placements"):
                assert param.grad.placements == param.placements, name
    assert_close_grads(model, plain, **near)
