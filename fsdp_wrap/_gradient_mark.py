"""`GradientMarks`: tell whether a user has zeroed gradients since unreduced ones were left behind."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["GradientMarks", "held_by_this_rank"]


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, looking at which is not collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version_of(tensor: torch.Tensor) -> int:
    """Returns what grows with each change in place, of a `DTensor` or of what this rank holds of it."""
    return tensor._version + held_by_this_rank(tensor)._version


class _Mark:
    """How a sharded parameter's gradient looked when unreduced gradients were left behind.

    A parameter without a gradient gets one of zeros, so that `zero_grad` of either kind leaves a trace.
    """

    def __init__(self, param: nn.Parameter, before: _Mark | None) -> None:
        self._param = param
        self._made = param.grad is None or (before is not None and before.made)
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        self._grad, self._version = param.grad, _version_of(param.grad)

    @property
    def made(self) -> bool:
        """Whether the gradient is the mark's own, and still there."""
        return self._made and self._param.grad is self._grad

    @property
    def zeroed(self) -> bool:
        """Whether the user has zeroed the gradient since."""
        grad = self._param.grad
        if grad is None:
            return True
        changed = grad is not self._grad or _version_of(grad) != self._version
        return changed and not held_by_this_rank(grad).any()


class GradientMarks:
    """The marks of a layout's sharded parameters, from what was left unreduced to the next reduction."""

    def __init__(self) -> None:
        self._marks: dict[nn.Parameter, _Mark] = {}

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return bool(self._marks)

    def put(self, params: Iterable[nn.Parameter]) -> None:
        """Marks, perhaps again, the parameters that need a gradient."""
        for param in params:
            if param.requires_grad:
                self._marks[param] = _Mark(param, self._marks.get(param))

    def zeroed(self, params: Iterable[nn.Parameter]) -> list[bool]:
        """For each parameter, whether it was marked and its gradient zeroed since."""
        return [param in self._marks and self._marks[param].zeroed for param in params]

    def take_away(self) -> None:
        """Forgets all marks, and removes the gradients that are the marks' own."""
        for param, mark in self._marks.items():
            if mark.made:
                param.grad = None
        self._marks.clear()
