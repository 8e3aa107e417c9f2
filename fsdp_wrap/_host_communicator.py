"""The communicator of ranks that share a host: their collectives go through shared memory.

Sums are made in the order of the ranks, so they do not depend on who comes first.
"""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._channel import Channel, Kind
from fsdp_wrap._collectives import ExchangeCommunicator
from fsdp_wrap._device import Pending
from fsdp_wrap._rendezvous import Exchange, open_channel
from fsdp_wrap._resizable import Buffer
from fsdp_wrap._shared_collective import Part, Room, SharedCollective
from fsdp_wrap._shared_memory import SharedBuffer, own_memory
from fsdp_wrap._signals import require_futex

__all__ = ["HostCommunicator"]

_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

_LEAST_POOLED = 1 << 16
"""Bytes: less comes from the C library as fast, and is copied as fast as it is noted where it lies."""

Parts = dict[int, torch.Tensor]  # by rank


class HostCommunicator(ExchangeCommunicator):
    """Shared memory where all ranks of the group can have it, else what is next best over gloo.

    Which it is shows at the first collective, since ranks may wrap their modules in any order. Broadcasts
    and gathers of parts stay with the process group: their callers promise not to hold anything twice.

    Args:
        ranks: The group, over gloo.
        device: The CPU.
        least: From how many bytes on ranks without shared memory exchange a full tensor.
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

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        if numel * dtype.itemsize < _LEAST_POOLED or not can_share():
            return super().buffer(numel, dtype)
        return SharedBuffer(numel, dtype, own_memory())

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        if (channel := self._channel) is None:
            return super().all_gather(full, fill)
        fill()
        return self._issue_each(channel, Kind.ALL_GATHER, [self._gathering(tensor) for tensor in full])

    def _gathering(self, full: torch.Tensor) -> Part:
        parts = _by_rank(full, self.size)
        own = parts.pop(self.rank)
        return Part(own, parts, own.nbytes)

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        if (channel := self._channel) is None:
            return super().reduce_scatter(shards, full)
        return self._issue_each(channel, Kind.REDUCE_SCATTER, list(map(self._reducing, shards, full)))

    def _reducing(self, shard: torch.Tensor, full: torch.Tensor) -> Part:
        own = self.own_part(full)
        return Part(
            full,
            dict.fromkeys((rank for rank in range(self.size) if rank != self.rank), own),
            full.nbytes,
            self.rank * own.nbytes,
            lambda parts: _reduce({**parts, self.rank: own}, shard, torch.add),
            in_place=True,
        )

    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        channel = self._channel
        if channel is None or op not in _REDUCTIONS:
            return super().all_reduce(tensors, op)

        def part(tensor: torch.Tensor) -> Part:
            return Part(
                tensor,
                dict.fromkeys(channel.peers, tensor),
                tensor.nbytes,
                take=lambda parts: _reduce({**parts, self.rank: tensor}, tensor, _REDUCTIONS[op]),
            )

        return self._issue_each(channel, Kind.ALL_REDUCE, [part(tensor) for tensor in tensors])

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (channel := self._channel) is None:
            super().gather(own, full)
            return
        parts: Parts = {}
        if full is not None:
            parts = _by_rank(full, self.size)
            if own.data_ptr() != full.data_ptr():
                parts[0].copy_(own)
            del parts[0]
        part = Part(own if full is None else None, parts, own.nbytes)
        self._issue_each(channel, Kind.GATHER, [part]).wait()

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (channel := self._channel) is None:
            super().scatter(own, full)
            return
        if full is not None:
            own.copy_(self.own_part(full))
        parts = {} if self.rank == 0 else {0: own}
        part = Part(full, parts, self.size * own.nbytes, self.rank * own.nbytes)
        self._issue_each(channel, Kind.SCATTER, [part]).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        if (channel := self._channel) is None:
            return super().all_gather_object(value)
        data = _pickled(value)
        every: dict[int, Any] = {self.rank: value}

        def take(parts: Parts) -> None:
            every.update({rank: _unpickled(data) for rank, data in parts.items()})

        part = Part(data, dict.fromkeys(channel.peers, data), None, take=take)
        self._issue_each(channel, Kind.OBJECT, [part]).wait()
        return [every[rank] for rank in range(self.size)]

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        if (channel := self._channel) is None:
            return super().all_to_all(received, sent)
        own = self.own_part(sent)
        parts = _by_rank(received, self.size)
        parts.pop(self.rank).copy_(own)
        part = Part(sent, parts, sent.nbytes, self.rank * own.nbytes)
        return self._issue_each(channel, Kind.ALL_TO_ALL, [part])

    def _issue_each(self, channel: Channel, kind: Kind, parts: list[Part]) -> Pending:
        """Issues one collective for each part."""
        every = [self._issue_on(channel, kind, part) for part in parts]
        return every[0] if len(every) == 1 else _All(every)

    def _issue_on(self, channel: Channel, kind: Kind, part: Part) -> Pending:
        if not channel.has_room():
            self._watch.issue(lambda: Room(channel), limited=True).wait()
        return self._watch.issue(lambda: SharedCollective(channel, kind, part), limited=True)


class _All:
    """Several that are waited for one after the other."""

    def __init__(self, every: list[Pending]) -> None:
        self._every = every

    def wait(self) -> None:
        for each in self._every:
            each.wait()


def _by_rank(full: torch.Tensor, size: int) -> Parts:
    """Returns each rank's part of an evenly sharded 1-D tensor."""
    return dict(enumerate(full.view(size, full.numel() // size).unbind()))


def _reduce(by_rank: Parts, target: torch.Tensor, operation: Callable[..., torch.Tensor]) -> None:
    """Combines all ranks' tensors, in the order of the ranks, into one that may be that of a rank.

    Where theirs are of another dtype, it is done in that of the target.
    """
    sources = [by_rank[rank] for rank in sorted(by_rank)]
    if target.is_floating_point() and target.element_size() == 1:  # torch does not compute with them
        target.copy_(functools.reduce(operation, [source.float() for source in sources]))
        return
    first, second, *rest = sources
    if first.dtype != target.dtype:
        target.copy_(first)
        first, rest = target, [source.to(target.dtype) for source in sources[1:]]
        second, *rest = rest
    rest = [source.clone() if source is target else source for source in rest]
    operation(first, second, out=target)
    for source in rest:
        operation(target, source, out=target)


def can_share() -> bool:
    """Whether this process can share memory, and buffers exchange theirs for it."""
    try:
        require_futex()
        own_memory()
    except (AttributeError, OSError, ValueError):  # no such call here, refused, or too large a map
        return False
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(bytes(data.tolist()))


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()
