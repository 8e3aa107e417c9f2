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

    def note(self) -> None:
        """Notes the gradients at the end of a backward: zeros may be sums, or marks of `no_sync`."""
        grads = [(param, param.grad) for param in self._params if param.grad is not None]
        self._noted = {param: (weakref.ref(grad), to_local(grad)._version) for param, grad in grads}

    def fates(self) -> list[int]:
        """Returns the fate of each gradient since the last backward of this rank."""
        return [self._fate(param) for param in self._params]

    def _fate(self, param: nn.Parameter) -> Fate:
        grad = param.grad
        if not to_local(param).numel():
            return Fate.UNKNOWN
        if grad is None:
            return Fate.DROPPED
        noted, version = self._noted.get(param, (None, -1))
        untouched = noted is not None and noted() is grad and to_local(grad)._version == version
        return Fate.KEPT if untouched or bool(to_local(grad).any()) else Fate.ZEROED


@torch.no_grad()
def follow_fates(params: Sequence[nn.Parameter], fates: Sequence[int]) -> None:
    """Does with gradients as other ranks have done; with those that no rank knows as with most others."""
    known = min(fates, default=Fate.UNKNOWN)
    for param, fate in zip(params, fates, strict=True):
        done = known if fate == Fate.UNKNOWN else fate
        if done == Fate.DROPPED:
            param.grad = None
        elif done == Fate.ZEROED and param.grad is not None:
            param.grad.zero_()
