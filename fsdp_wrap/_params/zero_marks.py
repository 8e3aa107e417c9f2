"""`GradientMarks`: tell whether a user has zeroed gradients since unreduced ones were left behind."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def held_by_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank holds of a tensor, looking at which is not collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _version_of(tensor: torch.Tensor) -> int:
    """Returns what grows with each change in place, of a `DTensor` or of what this rank holds of it."""
    return tensor._version + held_by_this_rank(tensor)._version


class GradientMarks(dict[nn.Parameter, tuple[torch.Tensor, int, bool]]):
    """How gradients of sharded parameters looked when unreduced ones were left behind.

    For each marked parameter its gradient, the version of that, and whether it is the mark's own: a parameter
    without a gradient gets one of zeros, so that `zero_grad` of either kind leaves a trace.
    """

    def put(self, params: Iterable[nn.Parameter]) -> None:
        """Marks, perhaps again, the parameters that need a gradient."""
        for param in params:
            if param.requires_grad:
                own = param.grad is None or self._has_own(param)
                if param.grad is None:
                    param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
                self[param] = param.grad, _version_of(param.grad), own

    def zeroed(self, params: Iterable[nn.Parameter]) -> list[bool]:
        """For each parameter, whether it was marked and its gradient zeroed since."""
        return [param in self and self._is_zeroed(param) for param in params]

    def take_away(self) -> None:
        """Forgets all marks, and removes the gradients that are the marks' own."""
        for param in self:
            if self._has_own(param):
                param.grad = None
        self.clear()

    def _has_own(self, param: nn.Parameter) -> bool:
        """Whether the gradient is a mark's own, and still there."""
        grad, _, own = self.get(param, (None, 0, False))
        return own and param.grad is grad

    def _is_zeroed(self, param: nn.Parameter) -> bool:
        marked, version, _ = self[param]
        grad = param.grad
        if grad is None:
            return True
        changed = grad is not marked or _version_of(grad) != version
        return changed and not held_by_this_rank(grad).any()
