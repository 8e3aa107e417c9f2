"""`GradientMarks`: detect gradients that users have zeroed while unreduced ones wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import warn_caller
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

    A parameter without a gradient gets one of negative zeros, so that `zero_grad` of either kind leaves a
    trace: it makes them positive. What scales gradients, such as clipping, does not.
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
                to_local(grad).neg_()
            held = mark.held if mark is not None and grad is mark.grad else to_local(grad)
            self[param] = _Mark(grad, held, grad._version + held._version, own)

    def zeroed(self, params: Sequence[nn.Parameter], fqns: Sequence[str] = ()) -> list[bool]:
        """Returns for each parameter whether it was marked and its gradient zeroed since.

        Warns of the first of `fqns` whose mark was written to otherwise: that has no effect.
        """
        marked = [(param.grad, self.get(param)) for param in params]
        told = [mark is not None and (grad is None or mark.is_left(grad)) for grad, mark in marked]
        written = [grad for (grad, _), left in zip(marked, told) if left and grad is not None]
        if written:  # with zeros or with other values: the host waits once to see all
            remaining = torch.stack([_any_marked(to_local(grad)) for grad in written]).tolist()
            scaled, seen = any(remaining), iter(remaining)  # what is empty here was scaled if another one was
            zeroed = [
                left and (grad is None or not (next(seen) or (scaled and not to_local(grad).numel())))
                for (grad, _), left in zip(marked, told)
            ]
            for fqn, (_, mark), left, zero in zip(fqns, marked, told, zeroed):
                if left and not zero and mark is not None and mark.own:
                    _warn_of_edit(fqn)
                    break
            return zeroed
        return told

    def take_away(self) -> None:
        """Drops all marks, and removes the gradients that they have made."""
        for param, mark in self.items():
            if mark.own and param.grad is mark.grad:
                param.grad = None
        self.clear()


def _any_marked(grad: torch.Tensor) -> torch.Tensor:
    """Whether any element is not a positive zero."""
    parts = torch.view_as_real(grad) if grad.is_complex() else grad
    return (parts.signbit() | (parts != 0)).any()


def _warn_of_edit(fqn: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    warn_caller(
        f"the gradient of '{fqn}' was scaled or written to on rank {rank} while gradients that "
        "no_sync() or set_requires_gradient_sync(False) accumulates wait for their sum. Until then .grad is "
        "zeros, so this has no effect: clip, unscale or log after the backward that reduces"
    )
