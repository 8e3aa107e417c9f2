"""The communicator of several hosts with several ranks each: a link between hosts carries nothing twice.

A rank exchanges only with its counterparts, the ranks of its number on the other hosts. Within each host,
shared memory passes on what came, or sums what is to go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.lanes import Pending
from fsdp_wrap._comm.messages import ExchangeCommunicator, Messages, exchange_gather, exchange_reduce
from fsdp_wrap._comm.process_group import Fill, Tensors, as_transport
from fsdp_wrap._comm.shared_memory.host import HostCommunicator


class TwoLevelCommunicator(ExchangeCommunicator):
    """Gathers and reduces in two steps, of which the second is issued when a result is waited for.

    The ranks of each host lie side by side. `gathers` and `sums` are two communicators within the host, since
    their collectives are not issued in one order.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        least: float,
        gathers: HostCommunicator,
        sums: HostCommunicator,
    ) -> None:
        super().__init__(ranks, device, least)
        self._gathers, self._sums = gathers, sums
        self._counterparts = range(gathers.rank, ranks.size, gathers.size)
        self._unfinished: deque[_InTurn] = deque()

    @property
    def way(self) -> str:
        return f"{self._gathers.way} within hosts, messages between them"

    def all_gather(self, full: Tensors, fill: Fill) -> Pending:
        blocks = [self._blocks(as_transport(tensor)) for tensor in full]

        def start(group: dist.ProcessGroup, _: bool) -> list[Messages]:
            fill()
            return [self._gather_between(of_hosts, group) for of_hosts in blocks]

        between = self._issue("gather", start)
        every = [block for of_hosts in blocks for block in of_hosts]
        return _InTurn(self._unfinished, between, lambda: self._gathers.all_gather(every, _nothing))

    def _gather_between(self, of_hosts: Tensors, group: dist.ProcessGroup) -> Messages:
        parts = map(self._gathers.own_part, of_hosts)
        return exchange_gather(group, self.rank, dict(zip(self._counterparts, parts)), self._lives)

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        sums = [[torch.empty_like(shard) for _ in self._counterparts] for shard in shards]

        def start(group: dist.ProcessGroup, _: bool) -> list[Messages]:
            return [self._reduce_between(shard, of_hosts, group) for shard, of_hosts in zip(shards, sums)]

        within = self._sums.reduce_scatter(
            [each for of_hosts in sums for each in of_hosts],
            [block for tensor in full for block in self._blocks(tensor)],
        )
        return _InTurn(self._unfinished, within, lambda: self._issue("reduce", start))

    def _reduce_between(self, shard: torch.Tensor, of_hosts: Tensors, group: dist.ProcessGroup) -> Messages:
        parts = dict(zip(self._counterparts, of_hosts))
        return exchange_reduce(group, self.rank, shard, parts, self._lives)

    def _blocks(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of an evenly sharded 1-D tensor that belong to the ranks of each host."""
        hosts = len(self._counterparts)
        return list(full.view(hosts, full.numel() // hosts).unbind())


class _InTurn:
    """A collective whose first of two steps was issued.

    Second steps are issued in the order of the first, on all ranks alike, whatever they wait for: to wait for
    one, a rank issues those of all before it. So of ranks that wait for different ones, the one that waits
    for the earliest has what it needs. `issue` issues the second step, once the first was waited for.
    """

    def __init__(self, unfinished: deque[_InTurn], first: Pending, issue: Callable[[], Pending]) -> None:
        self._unfinished, self._first, self._issue = unfinished, first, issue
        self._second: Pending | None = None
        unfinished.append(self)

    def wait(self) -> None:
        while self._second is None:
            next_one = self._unfinished[0]
            next_one._first.wait()
            next_one._second = next_one._issue()
            self._unfinished.popleft()  # now that this has not failed
        self._second.wait()


def _nothing() -> None:
    return None
