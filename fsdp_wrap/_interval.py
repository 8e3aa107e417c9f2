"""`Interval`: what a rank holds of one original parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["Interval"]


@dataclass(frozen=True)
class Interval:
    """The contiguous piece of one flattened original parameter that a rank holds.

    Attributes:
        fqn: Name of the original parameter within its unit.
        shape: Its shape.
        start: Index of the piece's first element in the flattened parameter.
        data: The piece, 1-D, in master dtype; writing into it changes the sharded parameter.
        source: The sharded parameter that holds it.
        offset: Index of the piece's first element in the flattened `source`.
        at: Index of the parameter's first element in a buffer of which each rank has an even part; 0 where it
            is cut by itself.
    """

    fqn: str
    shape: torch.Size
    start: int
    data: torch.Tensor
    source: nn.Parameter
    offset: int
    at: int = 0

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened parameter."""
        return self.start + self.data.numel()

    def within(self, like_source: torch.Tensor) -> torch.Tensor:
        """Returns the part of something of `source`'s shape (optimizer state, say) that belongs here."""
        return like_source.reshape(-1).narrow(0, self.offset, self.data.numel())
