"""Replica groups of two ranks in one test, and a manager that averages over them as torchft's does."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fronts import shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from resuming import Block

SHARDS = 2


class Manager:
    """Averages over the rank of the same number in each group that takes part."""

    def __init__(self) -> None:
        pairs = [dist.new_group([number, number + SHARDS]) for number in range(SHARDS)]
        self.pair = pairs[dist.get_rank() % SHARDS]
        self.alone = False
        self.averaged: list[int] = []
        self._use_async_quorum = False  # which torchft's DiLoCo reads
        self.states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def allreduce(self, tensor: torch.Tensor, **options: Any) -> Any:
        self.averaged.append(tensor.numel())
        if self.alone:
            return Done()
        tensor.div_(2)
        return dist.all_reduce(tensor, group=self.pair, async_op=True)

    def start_quorum(self) -> None:
        """Keeps the groups that are there."""

    def should_commit(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def allow_state_dict_read(self) -> None:
        """Does nothing: nobody reads in another thread."""

    disallow_state_dict_read = allow_state_dict_read

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        assert key not in self.states
        self.states[key] = (load_state_dict, state_dict)

    def heal(self, rank: int) -> None:
        """Gives the second group the first one's state: as bytes, rank by rank."""
        (load, give) = self.states["fsdp_wrap"]
        sent = [give() if rank < SHARDS else None]
        dist.broadcast_object_list(sent, src=rank % SHARDS, group=self.pair)
        if rank >= SHARDS:
            load(sent[0])


class Done:
    def wait(self) -> None:
        pass


def sharded(front: str, module: nn.Module, rank: int) -> nn.Module:
    groups = [dist.new_group(list(range(first, first + SHARDS))) for first in (0, SHARDS)]
    own = groups[rank // SHARDS]
    return shard(front, module, ModuleWrapPolicy({Block}), process_group=own)
