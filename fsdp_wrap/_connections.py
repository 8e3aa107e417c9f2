"""Which ranks of a group have ended, also those that have never used this library.

A process that ends closes its connections, whoever has started it. Gloo tells of that when something is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._positions import GroupPositions

__all__ = ["Connections"]

_TAG = 0x66736474  # of messages that nobody waits for; no user is likely to choose it


class Connections:
    """What is known of the other ranks of a group.

    Args:
        group: The process group.
        positions: Where its ranks stand.
    """

    def __init__(self, group: dist.ProcessGroup, positions: GroupPositions) -> None:
        self._members = dist.get_process_group_ranks(group)
        self._own = dist.get_rank(group)
        self._backend = _gloo_of(group)
        self._positions = positions

    def ended(self) -> list[int]:
        """Returns the ranks that have ended, as the default group counts them."""
        others = (rank for rank in range(len(self._members)) if rank != self._own)
        return [self._members[rank] for rank in others if self.has_ended(rank)]

    def has_ended(self, rank: int) -> bool:
        """Whether a rank of the group has ended, as far as can be known."""
        member = self._members[rank]
        if self._positions.knows(member):
            return not self._positions.lives(member)
        return self._backend is not None and self._is_closed(rank)

    def _is_closed(self, rank: int) -> bool:
        try:
            self._backend.send([torch.zeros(1, dtype=torch.uint8)], rank, _TAG)
        except RuntimeError:
            return True
        return False


def _gloo_of(group: dist.ProcessGroup) -> Any:
    """Returns what sends from the CPU, if that is gloo."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none sends from there
        return None
    return backend if dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo) else None
