"""The state that an optimizer begins with, found without a step of its own; and state as it was saved."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import warn_caller
from fsdp_wrap._state.small_states import small_states_of


def initial_state(
    optim: torch.optim.Optimizer,
    params: Sequence[Sequence[nn.Parameter]],
    empty: Collection[int] = (),
) -> list[list[dict[str, Any]]]:
    """Returns the state that a first step would make, without taking that step.

    A copy of the optimizer steps parameters of zeros by gradients of zeros. What it compiles runs eagerly.

    Args:
        optim: The optimizer, as clients may wrap it.
        params: Some of its parameters, by group.
        empty: The ids of those without elements on any rank, which have state all the same.

    Returns:
        For each of these its state, with counts of zero; an empty one where there is none. A warning says why
        if no step can be taken.
    """
    inner = innermost(optim)
    double = object.__new__(type(inner))
    double.__dict__.update(inner.__dict__)
    double.state = defaultdict(dict)
    zeros = [[_zero(param, param.numel() > 0 or id(param) in empty) for param in group] for group in params]
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


def innermost(optim: Any) -> Any:
    """Returns the optimizer that has the state, of one that clients may have wrapped."""
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


# as saved


def as_saved(
    name_of: Callable[[nn.Parameter], str],
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    dtypes: Mapping[str, Any],
) -> Callable[[], None]:
    """Returns what makes an optimizer's state exactly that of a state dict, once it has loaded that.

    Torch casts floats to the dtype of the parameter, also integers and what an optimizer keeps in float32,
    and makes generators of strings. The cast stands where the parameter had another dtype when it was saved.

    Args:
        name_of: Returns the name of a parameter that the optimizer holds.
        optim: The optimizer.
        state_dict: What it will load.
        dtypes: Of the saved parameters, by name.

    Raises:
        ValueError: If what is saved lacks what the optimizer needs, as that of another optimizer.
    """
    inner, states = innermost(optim), state_dict["state"]
    groups = zip(inner.param_groups, state_dict["param_groups"])
    params = {
        key: param
        for own, group in groups
        for key, param in zip(group["params"], own["params"])
        if states.get(key)
    }
    begins = _begins_with(inner, state_dict, params)
    for key, param in params.items():
        if missing := [name for name in begins[key] if name not in states[key]]:
            raise ValueError(
                f"the saved optimizer state of '{name_of(param)}' has {', '.join(states[key])}, and "
                f"{type(inner).__name__} needs {', '.join(missing)}: it is of another optimizer. Make that "
                "one, or pass optim=None"
            )

    def restore() -> None:
        for key, param in params.items():
            entry = inner.state.get(param, {})
            saved_dtype = dtypes.get(name_of(param), param.dtype)
            for name in entry.keys() & states[key].keys() - {"step"}:
                begun = getattr(begins[key].get(name), "dtype", None)
                entry[name] = _exact(states[key][name], entry[name], saved_dtype != param.dtype, begun)

    return restore if small_states_of(inner) is None else lambda: None  # those have few bits of their own


def _begins_with(
    inner: Any, state_dict: Mapping[str, Any], params: Mapping[Any, Any]
) -> dict[Any, Mapping[str, Any]]:
    """Returns the state that a first step of one of torch's optimizers makes, of small tensors.

    Others are not asked.

    Args:
        inner: The optimizer.
        state_dict: What it will load, with its options.
        params: By the keys of the former.
    """
    found: dict[Any, Mapping[str, Any]] = dict.fromkeys(params, {})
    if not inspect.unwrap(type(inner).step).__module__.startswith("torch.optim."):
        return found
    saved = state_dict["param_groups"]
    double = object.__new__(type(inner))
    double.__dict__.update(inner.__dict__)
    double.param_groups = [{**own, **group} for own, group in zip(inner.param_groups, saved)]
    small = [{_kind(params[key]): key for key in group["params"] if key in params} for group in saved]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may need more than gradients
        begun = initial_state(double, [[_small(params[key]) for key in kinds.values()] for kinds in small])
    for group, kinds, states in zip(saved, small, begun):
        by_kind = dict(zip(kinds, states))
        found |= {key: by_kind[_kind(params[key])] for key in group["params"] if key in params}
    return found


def _kind(param: torch.Tensor) -> tuple[Any, ...]:
    return param.dim(), param.dtype, param.device


def _small(param: torch.Tensor) -> nn.Parameter:
    shape = [min(size, 2) for size in param.shape]
    return nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=param.device))


def _exact(saved: Any, loaded: Any, recast: bool, begun: torch.dtype | None) -> Any:
    """Returns a value as it was saved, where the optimizer has it.

    Args:
        saved: What was saved.
        loaded: What the optimizer has made of it.
        recast: Whether the parameter had another dtype when it was saved.
        begun: The dtype in which the optimizer begins it, if that is known.
    """
    if isinstance(saved, str):
        return saved if isinstance(loaded, str) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {
            key: _exact(saved[key], value, recast, begun) if key in saved else value
            for key, value in loaded.items()
        }
    if isinstance(saved, (list, tuple)) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(_exact(*pair, recast, begun) for pair in zip(saved, loaded))
    if not isinstance(saved, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return loaded
    if saved.dtype == loaded.dtype or saved.shape != loaded.shape:
        return loaded
    if saved.is_floating_point() and loaded.is_floating_point():
        widened = torch.promote_types(saved.dtype, loaded.dtype) == loaded.dtype
        if recast or (widened and begun == loaded.dtype):  # of an optimizer that keeps fewer bits
            return loaded
    return saved.to(loaded.device)
