"""What is to be known of optimizers' steps: how many there were, and with parameters that training has left.

Their kernels do not always move version counters: so steps are counted, and those of fused kernels noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core.modules import is_owned

NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor)
"""Optimizers of torch that compute with numbers of whole parameters, or of all of them."""

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


@functools.cache
def note_fused_steps() -> None:
    """Lets steps by fused kernels be seen as what writes to sharded parameters."""
    register_optimizer_step_post_hook(_note_fused)


def _note_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([each for each in group["params"] if each.grad is not None and is_owned(each)])


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


def refuse_pieces_in_steps(
    params: Iterable[tuple[nn.Parameter, tuple[type[torch.optim.Optimizer], ...], Callable[[], str]]],
) -> None:
    """Lets some kinds of optimizers raise when they step with these parameters, before anything changes.

    Args:
        params: Each with the kinds, of `NOT_ELEMENTWISE`, and what tells why: the rest of a sentence.
    """
    _watch_pieces()
    for param, kinds, reason in params:
        _pieces[param] = kinds, reason


_pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _watch_pieces() -> None:
    register_optimizer_step_pre_hook(_refuse_pieces)


def _refuse_pieces(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, NOT_ELEMENTWISE):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in _pieces:
                kinds, reason = _pieces[param]
                if isinstance(optimizer, kinds):
                    raise RuntimeError(f"{type(optimizer).__name__} {reason()}")


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_left)


def _refuse_left(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if _LEFT in param.__dict__ and param in _reasons:  # others have copied the attribute
                raise RuntimeError(f"this {type(optimizer).__name__} {_reasons[param]()}")
