"""The communicator of ranks of which some may share a host: it finds out, and takes the fitting way."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.buffers import Buffer
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.process_group import Communicator, GroupCommunicator
from fsdp_wrap._comm.select import between_any, shared_memory_between
from fsdp_wrap._comm.shared_memory.host import HostCommunicator
from fsdp_wrap._comm.shared_memory.memory import SharedBuffer, own_memory
from fsdp_wrap._comm.shared_memory.rendezvous import (
    StoreGather,
    can_share,
    find_hosts,
    open_channel,
)

_LEAST_POOLED = 1 << 16
"""Bytes: smaller buffers are allocated as fast by the C library, and copied as fast as shown in place."""


@shared_memory_between.fill
class AutomaticCommunicator(GroupCommunicator):
    """A communicator that is chosen at the first collective, by the hosts of the ranks.

    Ranks cannot compare hosts before, since they may wrap their modules in any order. All ranks on one host:
    shared memory. Several hosts, or a host that does not allow it: `between_any`.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float) -> None:
        super().__init__(ranks, device)
        self._least = least

    @property
    def way(self) -> str:
        group = self._reference()
        chosen = None if group is None else _chosen.get(group)
        return "shared memory where ranks share a host" if chosen is None else chosen.way

    @property
    def _best(self) -> Communicator:
        group = self.group
        chosen = _chosen.get(group)
        if chosen is None:
            chosen = _chosen[group] = self._choose(Ranks(group, self.rank, self.size))
        return chosen

    def _choose(self, ranks: Ranks) -> Communicator:
        hosts = find_hosts(ranks, self._gather_objects)
        on_one_host = hosts is not None and len({*hosts}) == 1
        channel = open_channel(ranks, self._gather_objects) if on_one_host else None
        if channel is None:
            return between_any(ranks, self.device, self._least)
        return HostCommunicator(ranks, self.device, channel)

    def _gather_objects(self, value: Any) -> list[Any]:
        ranks = Ranks(self.group, self.rank, self.size)
        self._compare()
        return StoreGather(ranks, value, self._watch).values()

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        if numel * dtype.itemsize < _LEAST_POOLED or not can_share():
            return super().buffer(numel, dtype)
        return SharedBuffer(numel, dtype, own_memory())


class _AsChosen:
    """A method of the chosen communicator, which an instance keeps after the first lookup.

    It has no lock: that of a `cached_property` before Python 3.12 is one for all instances. Then two threads
    that communicate for the first time wait for each other's ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, automatic: AutomaticCommunicator, owner: object) -> Any:
        method = vars(automatic)[self._name] = getattr(automatic._best, self._name)
        return method


for _name in (
    *("gather_into", "all_gather", "all_gather_parts", "reduce_scatter", "all_reduce", "broadcast", "gather"),
    *("scatter", "all_gather_object", "broadcast_object", "all_to_all"),
):
    setattr(AutomaticCommunicator, _name, _AsChosen(_name))

_chosen: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
