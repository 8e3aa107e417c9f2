"""The communicator of ranks that share a host: their collectives go through shared memory.

Sums are made in the order of the ranks, so they do not depend on who comes first.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._channel import Channel, Kind
from fsdp_wrap._collectives import ExchangeCommunicator
from fsdp_wrap._device import Pending
from fsdp_wrap._rendezvous import Exchange, open_channel

__all__ = ["HostCommunicator"]

_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

Tensors = Sequence[torch.Tensor]
Posts = Sequence[tuple[Tensors, Iterable[int]]]  # what goes to which ranks
Arrived = Mapping[int, Tensors]  # what came, by rank


class HostCommunicator(ExchangeCommunicator):
    """Shared memory where all ranks of the group can have it, else what is next best over gloo.

    Which it is shows at the first collective, since ranks may wrap their modules in any order. Broadcasts
    and gathers of parts stay with the process group: their callers promise not to hold anything twice.
    """

    @property
    def _channel(self) -> Channel | None:
        group = self._group
        if group not in _channels:
            _channels[group] = open_channel(self.rank, self.size, self._exchange)
        return _channels[group]

    @property
    def way(self) -> str:
        group = self._reference()
        refused = group is not None and _channels.get(group, self) is None
        return "" if refused else "shared memory"

    def _exchange(self, value: Any) -> list[Any]:
        exchange = Exchange(self._group, self.rank, self.size, value)
        self._watch.issue(lambda: exchange, limited=True).wait()
        return exchange.values()

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        if (channel := self._channel) is None:
            return super().all_gather(full, fill)
        parts = self._by_rank(full)

        def post() -> Posts:
            fill()
            return [(parts[self.rank], channel.peers)]

        return self._issue_on(channel, Kind.ALL_GATHER, post, self._of_peers(parts))

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        if (channel := self._channel) is None:
            return super().reduce_scatter(shards, full)
        parts = self._by_rank(full)
        return self._issue_on(
            channel,
            Kind.REDUCE_SCATTER,
            lambda: [(parts[peer], [peer]) for peer in channel.peers],
            dict.fromkeys(channel.peers, parts[self.rank]),
            lambda arrived: _reduce({**arrived, self.rank: parts[self.rank]}, shards, torch.add),
        )

    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        channel = self._channel
        if channel is None or op not in _REDUCTIONS:
            return super().all_reduce(tensors, op)
        return self._issue_on(
            channel,
            Kind.ALL_REDUCE,
            lambda: [(tensors, channel.peers)],
            dict.fromkeys(channel.peers, tensors),
            lambda arrived: _reduce({**arrived, self.rank: tensors}, tensors, _REDUCTIONS[op]),
        )

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (channel := self._channel) is None:
            super().gather(own, full)
        elif full is None:
            self._issue_on(channel, Kind.GATHER, lambda: [([own], [0])], {}).wait()
        else:
            parts = self._by_rank([full])
            if own.data_ptr() != full.data_ptr():
                parts[0][0].copy_(own)
            self._issue_on(channel, Kind.GATHER, list, self._of_peers(parts)).wait()

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (channel := self._channel) is None:
            super().scatter(own, full)
        elif full is None:
            self._issue_on(channel, Kind.SCATTER, list, {0: [own]}).wait()
        else:
            parts = self._by_rank([full])
            own.copy_(parts[0][0])
            self._issue_on(
                channel, Kind.SCATTER, lambda: [(parts[peer], [peer]) for peer in channel.peers], {}
            ).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        if (channel := self._channel) is None:
            return super().all_gather_object(value)
        data = [_pickled(value)]
        every = {self.rank: data}
        self._issue_on(
            channel,
            Kind.OBJECT,
            lambda: [(data, channel.peers)],
            dict.fromkeys(channel.peers),
            lambda arrived: every.update({rank: [data.clone()] for rank, [data] in arrived.items()}),
        ).wait()
        return [_unpickled(every[rank][0]) for rank in range(self.size)]

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        if (channel := self._channel) is None:
            return super().all_to_all(received, sent)
        going, coming = self._by_rank([sent]), self._by_rank([received])
        coming[self.rank][0].copy_(going[self.rank][0])
        return self._issue_on(
            channel,
            Kind.ALL_TO_ALL,
            lambda: [(going[peer], [peer]) for peer in channel.peers],
            self._of_peers(coming),
        )

    def _issue_on(
        self,
        channel: Channel,
        kind: Kind,
        post: Callable[[], Posts],
        wanted: Mapping[int, Tensors | None],
        combine: Callable[[Arrived], None] | None = None,
    ) -> Pending:
        """Issues a collective.

        Args:
            channel: By which.
            kind: Which.
            post: Returns what this rank posts.
            wanted: Like what other ranks post for this one; None where that does not show beforehand.
            combine: Uses what came; otherwise it is copied into what was wanted.
        """
        collective = _Collective(channel, kind, wanted, combine)
        return self._watch.issue(lambda: collective.begin(post), limited=True)

    def _by_rank(self, full: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Returns each rank's part of evenly sharded 1-D tensors."""
        rows = [tensor.view(self.size, tensor.numel() // self.size).unbind() for tensor in full]
        return {rank: [row[rank] for row in rows] for rank in range(self.size)}

    def _of_peers(self, parts: Mapping[int, Tensors]) -> dict[int, Tensors]:
        return {rank: part for rank, part in parts.items() if rank != self.rank}


class _Collective:
    """One collective that was issued, and completes when it is waited for."""

    def __init__(
        self,
        channel: Channel,
        kind: Kind,
        wanted: Mapping[int, Tensors | None],
        combine: Callable[[Arrived], None] | None,
    ) -> None:
        self._channel, self._kind, self._number = channel, kind, channel.begin()
        self._wanted, self._combine = wanted, combine

    def begin(self, post: Callable[[], Posts]) -> _Collective:
        """Posts this rank's data."""
        for tensors, ranks in post():
            self._channel.post(self._kind, self._number, tensors, ranks)
        return self

    def wait(self) -> None:
        while not self.wait_for(timedelta(seconds=1)):
            pass

    def wait_for(self, limit: timedelta) -> bool:
        if not self._channel.arrived(self._number, self._wanted, limit.total_seconds()):
            return False
        try:
            self._take({rank: self._read(rank) for rank in self._wanted})
        finally:
            self._release()
        return True

    def _read(self, rank: int) -> Tensors:
        return self._channel.read(self._kind, self._number, rank, self._wanted[rank])

    def _take(self, arrived: Arrived) -> None:
        if self._combine is not None:
            self._combine(arrived)
            return
        for rank, tensors in self._wanted.items():
            for target, source in zip(tensors or (), arrived[rank]):
                target.copy_(source)

    def _release(self) -> None:
        wanted, self._wanted = self._wanted, {}
        self._channel.release(self._number, wanted)

    def __del__(self) -> None:
        self._release()  # of a wait that was given up, so that the peers' memory is free again


def _reduce(by_rank: Arrived, targets: Tensors, operation: Callable[..., torch.Tensor]) -> None:
    """Combines all ranks' tensors, in the order of the ranks, into some that may be those of one rank.

    Where theirs are of another dtype, it is done in that of the targets.
    """
    for index, target in enumerate(targets):
        sources = [by_rank[rank][index] for rank in sorted(by_rank)]
        if target.is_floating_point() and target.element_size() == 1:  # torch does not compute with them
            target.copy_(functools.reduce(operation, [source.float() for source in sources]))
            continue
        if sources[0].dtype != target.dtype:
            target.copy_(sources[0])
            for source in sources[1:]:
                operation(target, source.to(target.dtype), out=target)
            continue
        first, second, *rest = sources
        rest = [source.clone() if source is target else source for source in rest]
        operation(first, second, out=target)
        for source in rest:
            operation(target, source, out=target)


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(bytes(data.tolist()))


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()
