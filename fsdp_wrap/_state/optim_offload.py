"""State of optimizers in host memory between steps, while parameters and gradients stay on the device."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._comm import Accelerator, accelerator_of, await_arrivals, copy_to_device, copy_to_host
from fsdp_wrap._params import holding, to_local

_PIN = "_fsdp_pins_state"  # an attribute, since copies of parameters take it over

_Pairs = dict[Accelerator, list[tuple[torch.Tensor, torch.Tensor]]]

_Moved = tuple[nn.Parameter, dict[str, Any], str, torch.Tensor]
"""A parameter, its state, a key there, and what is to stand there."""

_homes: MutableMapping[nn.Parameter, dict[str, torch.Tensor]] = WeakIdKeyDictionary()
"""The host tensors of each parameter whose state is on the device, by key."""


def offload_optimizer_state(params: Iterable[nn.Parameter], pin: bool = True) -> None:
    """Keeps the state that any of torch's optimizers has of some parameters in host memory between steps.

    It comes to the device when a step begins, and goes back when that ends. The host waits for that, since
    users may look at the state then. Numbers without dimensions, as counts of steps, stay where they are.

    Args:
        params: The parameters. On the CPU nothing changes.
        pin: Whether the memory is pinned.
    """
    _watch()
    for param in params:
        param.__dict__[_PIN] = pin


def is_state_offloaded(param: torch.Tensor) -> bool:
    """Whether state of a parameter is in host memory between steps, so that nobody else is to keep it."""
    return _PIN in param.__dict__


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_bring)
    register_optimizer_step_post_hook(_send_back)


def _entries(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Accelerator, nn.Parameter, dict[str, Any], str, torch.Tensor]]:
    """Yields the offloaded state with dimensions, by parameter and key."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            accelerator = accelerator_of(param.device) if _PIN in param.__dict__ else None
            if accelerator is None or param not in optimizer.state:
                continue
            for key, value in optimizer.state[param].items():
                if isinstance(value, torch.Tensor) and value.dim() and to_local(value).numel():
                    yield accelerator, param, optimizer.state[param], key, value


@torch.no_grad()
def _bring(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    pairs: _Pairs = {}
    moved: list[_Moved] = []
    for accelerator, param, state, key, value in _entries(optimizer):
        home = to_local(value)
        if accelerator.is_on_host(home):
            there = torch.empty(home.shape, dtype=home.dtype, device=to_local(param).device)
            moved.append((param, state, key, holding(value, there)))
            pairs.setdefault(accelerator, []).append((there, home))
    for accelerator, copies in pairs.items():
        copy_to_device(accelerator, copies).wait()
    # Only now: if there is no memory for all, the state is what it was.
    for param, state, key, value in moved:
        _homes.setdefault(param, {})[key] = to_local(state[key])
        state[key] = value


@torch.no_grad()
def _send_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    pairs: _Pairs = {}
    moved: list[_Moved] = []
    for accelerator, param, state, key, value in _entries(optimizer):
        there, home = to_local(value), _homes.get(param, {}).pop(key, None)
        if accelerator.is_on_host(there):
            continue
        if home is None or home.shape != there.shape or home.dtype != there.dtype:
            home = accelerator.empty_on_host(there.numel(), there.dtype, param.__dict__[_PIN])
            home = home.view(there.shape)
        moved.append((param, state, key, holding(value, home)))
        pairs.setdefault(accelerator, []).append((home, there))
    for accelerator, copies in pairs.items():
        copy_to_host(accelerator, copies)
        await_arrivals(accelerator)  # so the next forward finds the memory of the device free
    for param, state, key, value in moved:
        state[key] = value
        _homes.pop(param, None)
