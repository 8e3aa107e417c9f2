"""Stands where a module is wrapped as one rank of many would wrap it, and the others are not there."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._mesh import Ranks

__all__ = ["AbsentCommunicator"]


class AbsentCommunicator(Communicator):
    """Allocates what would travel, and refuses to communicate.

    Args:
        ranks: This rank's place, as told by what stands in for a process group.
        device: Where the buffers live.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks.rank, ranks.size, device)
        self._group = ranks.group

    def _identity(self) -> object:
        return self.device, id(self._group)

    @property
    def members(self) -> frozenset[int]:
        return frozenset(range(self.size))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"this module was wrapped as rank {self.rank} of {self.size} with a "
            f"{type(self._group).__name__} as process_group, which tells a rank and a size and carries "
            "nothing: to run it, or to gather its parameters, wrap it with a torch.distributed.ProcessGroup"
        )

    all_gather = all_gather_parts = reduce_scatter = all_reduce = _refuse
    broadcast = gather = scatter = all_gather_object = broadcast_object = all_to_all = _refuse
