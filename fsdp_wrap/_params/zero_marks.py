"""`GradientMarks`: detect gradients that users have zeroed while unreduced ones wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp_wrap._params.parallel import to_local


class _Mark(NamedTuple):
    """A sharded parameter's gradient at the time when unreduced ones were left behind."""

    grad: torch.Tensor
    held: torch.Tensor  # its local part
    version: int  # grows with writes to either
    own: bool  # whether the gradient is the mark's, since the parameter had none

    def is_left(self, grad: torch.Tensor) -> bool:
        """Whether a parameter's present gradient is another one, or was written to since."""
        return grad is not self.grad or grad._version + self.held._version != self.version


class GradientMarks(dict[nn.Parameter, _Mark]):
    """Marks of sharded parameters while unreduced gradients wait.

    A parameter without a gradient gets one of zeros, so that `zero_grad` of either kind leaves a trace.
    """

    def put(self, params: Iterable[nn.Parameter]) -> None:
        """Marks, perhaps again, the parameters that need a gradient."""
        for param in params:
            if not param.requires_grad:
                continue
            mark, grad = self.get(param), param.grad
            own = grad is None or (mark is not None and mark.own and grad is mark.grad)
            if grad is None:
                grad = param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            held = mark.held if mark is not None and grad is mark.grad else to_local(grad)
            self[param] = _Mark(grad, held, grad._version + held._version, own)

    def zeroed(self, params: Sequence[nn.Parameter]) -> list[bool]:
        """Returns for each parameter whether it was marked and its gradient zeroed since."""
        marked = [(param.grad, self.get(param)) for param in params]
        told = [mark is not None and (grad is None or mark.is_left(grad)) for grad, mark in marked]
        written = [grad for (grad, _), left in zip(marked, told) if left and grad is not None]
        if written:  # with zeros or with other values: the host waits once to see all
            seen = iter(torch.stack([to_local(grad).any() for grad in written]).tolist())
            told = [left and (grad is None or not next(seen)) for (grad, _), left in zip(marked, told)]
        return told

    def take_away(self) -> None:
        """Drops all marks, and removes the gradients that they have made."""
        for param, mark in self.items():
            if mark.own and param.grad is mark.grad:
                param.grad = None
        self.clear()
