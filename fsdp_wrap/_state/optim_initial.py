"""The state that an optimizer begins with, found without a step of its own."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import warn_caller


def initial_state(
    optim: torch.optim.Optimizer, params: Sequence[Sequence[nn.Parameter]]
) -> list[list[dict[str, Any]]]:
    """Returns the state that a first step would make, without taking that step.

    A copy of the optimizer steps parameters of zeros by gradients of zeros. What it compiles runs eagerly.

    Args:
        optim: The optimizer, as clients may wrap it.
        params: Some of its parameters, by group.

    Returns:
        For each of these its state, with counts of zero; an empty one where there is none. A warning says why
        if no step can be taken.
    """
    inner: Any = optim
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):  # as clients wrap them
        inner = inner.optimizer
    double = object.__new__(type(inner))
    double.__dict__.update(inner.__dict__)
    double.state = defaultdict(dict)
    zeros = [[*map(_zero, of_group)] for of_group in params]
    double.param_groups = [
        {**group, "params": of_group} for group, of_group in zip(inner.param_groups, zeros)
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            inspect.unwrap(type(inner).step)(double)  # without hooks and the schedulers' counting
    except Exception as error:
        warn_caller(
            f"{type(inner).__name__} was never stepped, and what state it will have could not be found out "
            f"({error}): step it before its state is loaded by torch.distributed.checkpoint"
        )
        double.state.clear()
    found = [[double.state.get(zero, {}) for zero in of_group] for of_group in zeros]
    return [[{key: _uncounted(key, each[key]) for key in each} for each in of_group] for of_group in found]


def _zero(param: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros(param.shape, dtype=param.dtype, device=param.device, requires_grad=param.requires_grad)
    if param.requires_grad and param.numel() > 0:
        zero.grad = torch.zeros_like(zero)
    return zero


def _uncounted(key: str, value: Any) -> Any:
    if key != "step":
        return value
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
