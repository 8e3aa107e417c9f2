"""What is to be known of optimizers' steps: how many there were, and with which parameters none may be.

Their kernels do not always move version counters: so steps are counted, and those of fused kernels noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core.modules import is_owned


class _KnownByName(type):
    """Of a class that stands for one of another package, which is not imported for it."""

    path: tuple[str, str]

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.path in {(kind.__module__, kind.__qualname__) for kind in type(instance).__mro__}


class _TransformersAdafactor(metaclass=_KnownByName):
    path = "transformers.optimization", "Adafactor"


FACTORED: tuple[type, ...] = (torch.optim.Adafactor, _TransformersAdafactor)
"""Optimizers with state by rows and by columns, and with numbers of whole parameters."""

NOT_ELEMENTWISE: tuple[type, ...] = (torch.optim.LBFGS, *FACTORED)
"""Optimizers that compute with numbers of whole parameters, or of all of them."""

_ASKED = "_fsdp_asked_in_steps"  # an attribute, since it is asked for at each step of each parameter

_steps = 0
_refused = WeakIdKeyDictionary()  # for a parameter: the kinds of optimizers, and what tells why
_noted_elsewhere: WeakSet[torch.optim.Optimizer] = WeakSet()  # whose steps tell by themselves what they write
_refused_at_times = WeakIdKeyDictionary()  # for a parameter: what tells whether, and why


def steps_taken() -> int:
    """Returns how many steps optimizers have taken since `watch_steps`."""
    return _steps


@functools.cache
def watch_steps() -> None:
    """Lets steps be counted and refused, and those of fused kernels be seen as writing to parameters."""
    register_optimizer_step_pre_hook(_refuse)
    register_optimizer_step_post_hook(_note)


def note_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Leaves it to an optimizer to move the version counters of what its steps write to."""
    _noted_elsewhere.add(optimizer)


def refuse_in_steps(
    params: Iterable[tuple[nn.Parameter, Callable[[], str]]],
    kinds: tuple[type, ...] | None = None,
) -> None:
    """Lets optimizers that hold these parameters raise when they step, before anything changes.

    Args:
        params: Each with what tells why: the end of a sentence about the optimizer.
        kinds: The optimizers concerned, of `NOT_ELEMENTWISE`; None for all.
    """
    for param, reason in params:
        if kinds is None:
            param.__dict__[_ASKED] = True
        _refused[param] = kinds or torch.optim.Optimizer, reason


def refuse_in_steps_at_times(param: nn.Parameter, reason: Callable[[], str | None]) -> None:
    """Lets optimizers that hold a parameter raise before they step, as long as there is a reason.

    Args:
        param: The parameter.
        reason: Returns what tells why: the end of a sentence about the optimizer; None where it may step.
    """
    param.__dict__[_ASKED] = True
    _refused_at_times[param] = reason


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    needs_whole = isinstance(optimizer, NOT_ELEMENTWISE)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not needs_whole and _ASKED not in param.__dict__:
                continue
            if param in _refused:  # others have copied the attribute
                kinds, reason = _refused[param]
                if isinstance(optimizer, kinds):
                    raise RuntimeError(f"this {type(optimizer).__name__} {reason()}")
            told = _refused_at_times[param]() if param in _refused_at_times else None
            if told is not None:
                raise RuntimeError(f"this {type(optimizer).__name__} {told}")


def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _steps
    _steps += 1
    if optimizer in _noted_elsewhere:
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([each for each in group["params"] if each.grad is not None and is_owned(each)])
