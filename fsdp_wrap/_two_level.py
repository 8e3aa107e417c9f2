"""The communicator of several hosts with several ranks each: a link between hosts carries nothing twice.

A rank exchanges with its counterparts only, those that have its number on the other hosts. Within each host
what came is then passed on, or what is to go summed beforehand, by another communicator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_wrap._collectives import Communicator, ExchangeCommunicator, as_transport
from fsdp_wrap._device import Pending
from fsdp_wrap._exchange import Messages, exchange_gather, exchange_reduce
from fsdp_wrap._mesh import Ranks

__all__ = ["TwoLevelCommunicator"]


class TwoLevelCommunicator(ExchangeCommunicator):
    """Gathers and reduces in two steps, of which the second is issued when the result is waited for.

    Args:
        ranks: The group, over gloo, with the ranks of each host side by side.
        device: The CPU.
        least: From how many bytes on what does not go in two steps is exchanged.
        local: Communicates among the ranks of this host, as many as there are on the others.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float, local: Communicator) -> None:
        super().__init__(ranks, device, least)
        self._local = local
        self._counterparts = range(local.rank, ranks.size, local.size)

    @property
    def way(self) -> str:
        return f"{self._local.way or 'the process group'} within hosts, messages between them"

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        blocks = [self._blocks(as_transport(tensor)) for tensor in full]

        def start(async_op: bool) -> list[Messages]:
            fill()
            return [self._gather_between(of_hosts) for of_hosts in blocks]

        between = self._issue(self._gather_lane, start)
        every = [block for of_hosts in blocks for block in of_hosts]
        return _InTurn(between, lambda: self._local.all_gather(every, _nothing))

    def _gather_between(self, of_hosts: list[torch.Tensor]) -> Messages:
        parts = map(self._local.own_part, of_hosts)
        return exchange_gather(self._group, self.rank, dict(zip(self._counterparts, parts)), self._lives)

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        sums = [[torch.empty_like(shard) for _ in self._counterparts] for shard in shards]

        def start(async_op: bool) -> list[Messages]:
            return [self._reduce_between(shard, of_hosts) for shard, of_hosts in zip(shards, sums)]

        within = self._local.reduce_scatter(
            [each for of_hosts in sums for each in of_hosts],
            [block for tensor in full for block in self._blocks(tensor)],
        )
        return _InTurn(within, lambda: self._issue(self._reduce_lane, start))

    def _reduce_between(self, shard: torch.Tensor, of_hosts: list[torch.Tensor]) -> Messages:
        parts = dict(zip(self._counterparts, of_hosts))
        return exchange_reduce(self._group, self.rank, shard, parts, self._lives)

    def _blocks(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the views of an evenly sharded 1-D tensor that belong to the ranks of each host."""
        hosts = len(self._counterparts)
        return list(full.view(hosts, full.numel() // hosts).unbind())


class _InTurn:
    """A collective of two steps.

    Args:
        first: The first.
        issue_second: Issues the second.
    """

    def __init__(self, first: Pending, issue_second: Callable[[], Pending]) -> None:
        self._first, self._issue_second = first, issue_second
        self._second: Pending | None = None

    def wait(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._issue_second()
        self._second.wait()


def _nothing() -> None:
    return None
