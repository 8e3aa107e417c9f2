"""The state that an optimizer begins with, found without a step of its own."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import warn_caller


def initial_state(
    optim: torch.optim.Optimizer,
    params: Sequence[Sequence[nn.Parameter]],
    empty: Collection[int] = (),
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> list[list[dict[str, Any]]]:
    """Returns the state that a first step would make, with step counts of zero, without taking that step.

    A copy of the optimizer steps parameters of zeros by gradients of zeros; what it compiles runs eagerly. A
    warning says why if no step can be taken.

    Args:
        optim: The optimizer, as clients may wrap it.
        params: Some of its parameters, by group.
        empty: The ids of those without elements on any rank, which have state all the same.
        groups: Options of the groups; None for the optimizer's own.
    """
    inner = innermost(optim)
    double = object.__new__(type(inner))
    double.__dict__.update(inner.__dict__)
    double.state = defaultdict(dict)
    zeros = [[_zero(param, param.numel() > 0 or id(param) in empty) for param in group] for group in params]
    double.param_groups = [
        {**options, "params": of_group} for options, of_group in zip(groups or inner.param_groups, zeros)
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
    states = [[double.state.get(zero, {}) for zero in of_group] for of_group in zeros]
    return [
        [{key: _uncounted(key, state[key]) for key in state} for state in of_group] for of_group in states
    ]


def initial_state_of(
    optim: torch.optim.Optimizer, param: nn.Parameter, local: nn.Parameter | None = None
) -> dict[str, Any]:
    """Returns the initial state of one parameter of an optimizer, or of `local` in its place."""
    zeroed = param if local is None else local
    params = [[zeroed for member in group["params"] if member is param] for group in optim.param_groups]
    return next(state for of_group in initial_state(optim, params) for state in of_group)


def innermost(optim: Any) -> Any:
    """Returns the optimizer that holds the state, inside those that clients have wrapped around it."""
    while isinstance(getattr(optim, "optimizer", None), torch.optim.Optimizer):
        optim = optim.optimizer
    return optim


def _zero(param: torch.Tensor, has_state: bool) -> torch.Tensor:
    zero = torch.zeros(param.shape, dtype=param.dtype, device=param.device, requires_grad=param.requires_grad)
    if param.requires_grad and has_state:
        zero.grad = torch.zeros_like(zero)
    return zero


def _uncounted(key: str, value: Any) -> Any:
    if key != "step":
        return value
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
