"""Whether ranks of a gloo group have ended, also those that have never used this library.

A process that ends closes its connections, whoever has started it. Gloo tells of that when something is sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_wrap._positions import GroupPositions

__all__ = ["Connections"]

_TAG = 0x66736474  # of messages that nobody waits for; no user is likely to choose it


class Connections:
    """What is known of the other ranks of a group.

    Args:
        group: The process group, over gloo.
        positions: Where its ranks stand.
    """

    def __init__(self, group: dist.ProcessGroup, positions: GroupPositions) -> None:
        self._members = dist.get_process_group_ranks(group)
        self._backend = group._get_backend(torch.device("cpu"))
        self._positions = positions

    def has_ended(self, rank: int) -> bool:
        """Whether a rank of the group has ended, as far as can be known."""
        member = self._members[rank]
        if self._positions.knows(member):
            return not self._positions.lives(member)
        return self._is_closed(rank)

    def _is_closed(self, rank: int) -> bool:
        try:
            self._backend.send([torch.zeros(1, dtype=torch.uint8)], rank, _TAG)
        except RuntimeError:
            return True
        return False
