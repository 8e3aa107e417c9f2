"""`GradientMark`: tells whether a user has zeroed a gradient since unreduced ones were left behind."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["GradientMark", "held_by_this_rank", "version_of"]


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, looking at which is not collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def version_of(tensor: torch.Tensor) -> int:
    """Returns what grows with each change in place, of a `DTensor` or of what this rank holds of it."""
    return tensor._version + held_by_this_rank(tensor)._version


class GradientMark:
    """How a sharded parameter's gradient looked when unreduced gradients were left behind.

    A parameter without a gradient gets one of zeros, so that `zero_grad` of either kind leaves a trace.
    """

    def __init__(self, param: nn.Parameter, before: GradientMark | None) -> None:
        self._param = param
        self._made = param.grad is None or (before is not None and before.made)
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        self._grad, self._version = param.grad, version_of(param.grad)

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
        changed = grad is not self._grad or version_of(grad) != self._version
        return changed and not held_by_this_rank(grad).any()
