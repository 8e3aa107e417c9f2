"""How parameters and gradients of a unit travel, as its handle asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from fsdp_wrap._device import Pending
from fsdp_wrap._resizable import Buffer

__all__ = ["ReduceScatter", "Transport"]

ReduceScatter = Callable[[list[torch.Tensor], list[torch.Tensor]], Pending]
"""Fills the shards given first from the unsharded 1-D tensors given second, which it may spoil."""


class Transport(Protocol):
    """How parameters and gradients travel between the ranks of one copy, as a `Communicator` lets them.

    Attributes:
        keeps_notes: Whether what layouts note in a reduction arrives.
        compresses_reductions: Whether gradients travel in fewer bytes, which a communication hook would end.
    """

    keeps_notes: bool
    compresses_reductions: bool

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending: ...

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending: ...
