"""What is to be known of optimizers' steps: how many there were, and with parameters that training has left.

Their kernels do not always move version counters, so steps are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["refuse_in_steps", "steps_taken"]

_LEFT = "_fsdp_left_by_training"


class _Counter:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1


@functools.cache
def _counter() -> _Counter:
    counter = _Counter()
    register_optimizer_step_post_hook(counter)
    return counter


def steps_taken() -> int:
    """Returns how many steps optimizers have taken since the first call."""
    return _counter().steps


def refuse_in_steps(params: Iterable[tuple[nn.Parameter, Callable[[], str]]]) -> None:
    """Lets optimizers that hold these parameters raise when they step, before anything changes.

    Args:
        params: Each with what tells why: the end of a sentence about the optimizer.
    """
    _watch_steps()
    for param, reason in params:
        param.__dict__[_LEFT] = True
        _reasons[param] = reason


_reasons: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_left)


def _refuse_left(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if _LEFT in param.__dict__ and param in _reasons:  # others have copied the attribute
                raise RuntimeError(f"this {type(optimizer).__name__} {_reasons[param]()}")
