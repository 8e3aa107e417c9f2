"""`GradientMarks`: tell whether a user has zeroed gradients since unreduced ones were left behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fsdp_wrap._params.parallel import to_local


class _Mark(NamedTuple):
    """How the gradient of a sharded parameter looked when unreduced ones were left behind.

    Attributes:
        grad: It.
        held: What this rank holds of it.
        version: What grows with each change in place, of the gradient or of what this rank holds of it.
        own: Whether it is the mark's own, which the parameter has in place of none.
    """

    grad: torch.Tensor
    held: torch.Tensor
    version: int
    own: bool

    def is_left(self, grad: torch.Tensor) -> bool:
        """Whether the gradient that the parameter has now is another one, or was written to since."""
        return grad is not self.grad or grad._version + self.held._version != self.version


class GradientMarks(dict[nn.Parameter, _Mark]):
    """Marks of sharded parameters whose gradients wait unreduced.

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
        """For each parameter, whether it was marked and its gradient zeroed since."""
        marked = [(param.grad, self.get(param)) for param in params]
        told = [mark is not None and (grad is None or mark.is_left(grad)) for grad, mark in marked]
        written = [grad for (grad, _), left in zip(marked, told) if left and grad is not None]
        if written:  # with zeros or with anything else: the host waits once to see all
            seen = iter(torch.stack([to_local(grad).any() for grad in written]).tolist())
            told = [left and (grad is None or not next(seen)) for (grad, _), left in zip(marked, told)]
        return told

    def take_away(self) -> None:
        """Forgets all marks, and removes the gradients that are the marks' own."""
        for param, mark in self.items():
            if mark.own and param.grad is mark.grad:
                param.grad = None
        self.clear()
