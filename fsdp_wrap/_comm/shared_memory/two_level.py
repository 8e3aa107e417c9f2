"""The communicator of several hosts with several ranks each: a link between hosts carries nothing twice.

A rank exchanges with its counterparts only, those that have its number on the other hosts. Within each host
what came is then passed on, or what is to go summed beforehand, through shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.lanes import Pending
from fsdp_wrap._comm.messages import ExchangeCommunicator, Messages, exchange_gather, exchange_reduce
from fsdp_wrap._comm.objects import as_transport
from fsdp_wrap._comm.process_group import Fill, Tensors
from fsdp_wrap._comm.shared_memory.host import HostCommunicator

__all__ = ["TwoLevelCommunicator"]


class TwoLevelCommunicator(ExchangeCommunicator):
    """Gathers and reduces in two steps, of which the second is issued when a result is waited for.

    Args:
        ranks: The group, over gloo, with the ranks of each host side by side.
        device: The CPU.
        least: From how many bytes on what does not go in two steps is exchanged.
        gathers: Passes on among the ranks of this host, as many as there are on the others.
        sums: Sums among them; another one, since the two are not issued in one order.
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
        self._steps = _Steps()

    @property
    def way(self) -> str:
        return f"{self._gathers.way} within hosts, messages between them"

    def all_gather(self, full: Tensors, fill: Fill) -> Pending:
        blocks = [self._blocks(as_transport(tensor)) for tensor in full]

        def start(group: dist.ProcessGroup, _: bool) -> list[Messages]:
            fill()
            return [self._gather_between(of_hosts, group) for of_hosts in blocks]

        between = self._issue(self._gather_lane, start)
        every = [block for of_hosts in blocks for block in of_hosts]
        return self._steps.add(between, lambda: self._gathers.all_gather(every, _nothing))

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
        return self._steps.add(within, lambda: self._issue(self._reduce_lane, start))

    def _reduce_between(self, shard: torch.Tensor, of_hosts: Tensors, group: dist.ProcessGroup) -> Messages:
        parts = dict(zip(self._counterparts, of_hosts))
        return exchange_reduce(group, self.rank, shard, parts, self._lives)

    def _blocks(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of an evenly sharded 1-D tensor that belong to the ranks of each host."""
        hosts = len(self._counterparts)
        return list(full.view(hosts, full.numel() // hosts).unbind())


class _Steps:
    """Lets second steps be issued in the order of the first, on all ranks alike, whatever they wait for.

    Who waits for one issues the second steps of all before it. So of ranks that wait for different ones, that
    which waits for the first of them has what it needs.
    """

    def __init__(self) -> None:
        self._open: deque[_InTurn] = deque()

    def add(self, first: Pending, issue_second: Callable[[], Pending]) -> Pending:
        """Adds a collective of which the first step was issued."""
        self._open.append(_InTurn(self, first, issue_second))
        return self._open[-1]

    def issue_until(self, last: _InTurn) -> None:
        """Issues the second steps of all until one, which is open."""
        issued: _InTurn | None = None
        while issued is not last:
            issued = self._open[0]
            issued.issue_second()
            self._open.popleft()  # now that this has not failed


class _InTurn:
    """A collective of two steps."""

    def __init__(self, steps: _Steps, first: Pending, issue: Callable[[], Pending]) -> None:
        self._steps, self._first, self._issue = steps, first, issue
        self._second: Pending | None = None

    def issue_second(self) -> None:
        """Waits for the first step."""
        self._first.wait()
        self._second = self._issue()

    def wait(self) -> None:
        if self._second is None:
            self._steps.issue_until(self)
        assert self._second is not None
        self._second.wait()


def _nothing() -> None:
    return None
