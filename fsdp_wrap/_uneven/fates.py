"""`GradientFates`: what programs do with gradients between backwards; ranks without a batch do the same."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
from torch import nn

from fsdp_wrap._params import to_local


class Fate(IntEnum):
    """What a program has done with a gradient since a backward; the least of some ranks' counts."""

    KEPT = 0
    ZEROED = 1
    DROPPED = 2
    UNKNOWN = 3  # this rank has no element of the parameter


class GradientFates:
    """The gradients of sharded parameters, in one order on all ranks.

    Args:
        params: The sharded parameters.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = [*params]
        self.note()

    def note(self, complete: bool = True, norms: bool = False) -> None:
        """Notes the gradients at the end of a backward: zeros may be sums, or marks of `no_sync`.

        Args:
            complete: Whether no reduction is in flight; else none is noted.
            norms: Whether norms are noted too: a `GradScaler` writes without raising version counters.
        """
        params = self._params if complete else ()
        grads = [(param, param.grad) for param in params if param.grad is not None]
        self._noted = {param: (weakref.ref(grad), to_local(grad)._version) for param, grad in grads}
        self._norms = {param: _norm(grad) for param, grad in grads if norms}

    def fates(self) -> list[int]:
        """Returns the fate of each gradient since the last backward of this rank."""
        return [self._fate(param) for param in self._params]

    def was_written(self, param: nn.Parameter) -> bool:
        """Whether a gradient is still there, but not as it was noted."""
        grad, norm = param.grad, self._norms.get(param)
        if grad is None or param not in self._noted:
            return False
        return not self._is_noted(param, grad) or (norm is not None and not torch.equal(_norm(grad), norm))

    def _is_noted(self, param: nn.Parameter, grad: torch.Tensor) -> bool:
        noted, version = self._noted.get(param, (None, -1))
        return noted is not None and noted() is grad and to_local(grad)._version == version

    def _fate(self, param: nn.Parameter) -> Fate:
        if not to_local(param).numel():
            return Fate.UNKNOWN
        if param.grad is None:
            return Fate.DROPPED
        kept = self._is_noted(param, param.grad) or bool(to_local(param.grad).any())
        return Fate.KEPT if kept else Fate.ZEROED


def _norm(grad: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(to_local(grad), 1)
    return norm.nan_to_num()  # NaN equals nothing


@torch.no_grad()
def follow_fates(params: Sequence[nn.Parameter], fates: Sequence[int]) -> None:
    """Drops or zeroes gradients as other ranks did; where no rank knows, does the least done to any."""
    known = min(fates, default=Fate.UNKNOWN)
    for param, fate in zip(params, fates, strict=True):
        done = known if fate == Fate.UNKNOWN else fate
        if done == Fate.DROPPED:
            param.grad = None
        elif done == Fate.ZEROED and param.grad is not None:
            param.grad.zero_()
