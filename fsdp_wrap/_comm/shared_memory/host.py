"""The communicator of ranks that share a host: their collectives go through shared memory.

Sums are made in the order of the ranks, so they do not depend on who comes first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.buffer import Buffer
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.lanes import Pending, Work
from fsdp_wrap._comm.process_group import SUM, Fill, GroupCommunicator, Op, Tensors
from fsdp_wrap._comm.shared_memory.channel import Channel, Kind
from fsdp_wrap._comm.shared_memory.collective import Part, Room, SharedCollective
from fsdp_wrap._comm.shared_memory.lending import CommonGather, Lending
from fsdp_wrap._comm.shared_memory.memory import Lease, SharedBuffer
from fsdp_wrap._comm.watch import InFlight
from fsdp_wrap._core.torch_private import FakeProcessGroup, HashStore, current_dispatch_mode

__all__ = ["HostCommunicator"]

_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

_PIECE = 1 << 17
"""Bytes of a broadcast at a time: initialisation promises to hold no more than so much twice."""

Parts = dict[int, torch.Tensor]  # by rank


class HostCommunicator(GroupCommunicator):
    """Collectives through memory that the ranks of the group share.

    Left to the group are other reductions, and gathers of parts: streams promise not to hold anything twice.

    Args:
        ranks: The group, whose ranks share a host.
        device: The CPU.
        channel: Between them.
    """

    def __init__(self, ranks: Ranks, device: torch.device, channel: Channel) -> None:
        super().__init__(ranks, device)
        self._channel = channel
        self._lending = Lending(channel)
        self._peers = [rank for rank in range(self.size) if rank != self.rank]

    @property
    def way(self) -> str:
        return "shared memory"

    def gather_into(self, buffers: list[Buffer], fill: Fill) -> Pending:
        common = [buffer for buffer in buffers if isinstance(buffer, SharedBuffer)]
        if len(common) < len(buffers) or not self._lending.possible:
            return super().gather_into(buffers, fill)
        # Of other tensors, since telling writes to them, and others write to what is lent.
        self._tell_of_gathers(torch.empty_like(buffer.data) for buffer in buffers)
        first = self._channel.next_number
        leases = [self._lease(buffer, number) for number, buffer in enumerate(common, first)]
        fill()
        gather = partial(CommonGather, self._channel, self._lending)
        return self._issue_each([partial(gather, *each) for each in zip(common, leases)])

    def _lease(self, buffer: SharedBuffer, number: int) -> Lease | None:
        """Lets a buffer lie in what is lent for a gather of some number, if that is known already."""
        lease = self._lending.lease(number, buffer.nbytes)
        if lease is None:
            buffer.allocate()
        else:
            buffer.hold(self._lending.shared(lease, buffer.nbytes))
        return lease

    def all_gather(self, full: Tensors, fill: Fill) -> Pending:
        self._tell_of_gathers(full)
        fill()
        return self._post_each(Kind.ALL_GATHER, map(self._gathering, full))

    def _tell_of_gathers(self, full: Iterable[torch.Tensor]) -> None:
        if (listening := self._listening()) is not None:
            for tensor in full:
                listening._allgather_base(tensor, self.own_part(tensor))

    def _gathering(self, full: torch.Tensor) -> Part:
        parts = _by_rank(full, self.size)
        own = parts.pop(self.rank)
        return Part(own, parts, own.nbytes)

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        if (listening := self._listening()) is not None:
            for shard, source in zip(shards, full):
                listening._reduce_scatter_base(shard, source, dist.ReduceScatterOptions())
        return self._post_each(Kind.REDUCE_SCATTER, map(self._reducing, shards, full))

    def _reducing(self, shard: torch.Tensor, full: torch.Tensor) -> Part:
        own = self.own_part(full)
        return Part(
            full,
            dict.fromkeys(self._peers, own),
            full.nbytes,
            self.rank * own.nbytes,
            lambda parts: _reduce({**parts, self.rank: own}, shard, torch.add),
            in_place=True,
        )

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        if op not in _REDUCTIONS:
            return super().all_reduce(tensors, op)
        if (listening := self._listening()) is not None:
            for tensor in tensors:
                listening.allreduce([tensor])
        operation = _REDUCTIONS[op]
        return self._post_each(Kind.ALL_REDUCE, [self._combining(each, operation) for each in tensors])

    def _combining(self, tensor: torch.Tensor, operation: Callable[..., torch.Tensor]) -> Part:
        row = tensor.detach().view(-1)
        return Part(
            row,
            dict.fromkeys(self._peers, row),
            row.nbytes,
            take=lambda parts: _reduce({**parts, self.rank: row}, row, operation),
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        if (listening := self._listening()) is not None:
            listening.broadcast([tensor])
        for piece in torch.split(tensor.detach().view(-1), max(1, _PIECE // tensor.element_size())):
            mine = self.rank == 0
            part = Part(piece if mine else None, {} if mine else {0: piece}, piece.nbytes)
            self._post(Kind.BROADCAST, part).wait()

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (listening := self._listening()) is not None:
            outputs = [] if full is None else [list(full.chunk(self.size))]
            listening.gather(outputs, [own], dist.GatherOptions())
        parts: Parts = {}
        if full is not None:
            parts = _by_rank(full, self.size)
            if own.data_ptr() != full.data_ptr():
                parts[0].copy_(own)
            del parts[0]
        part = Part(own if full is None else None, parts, own.nbytes)
        self._post(Kind.GATHER, part).wait()

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if (listening := self._listening()) is not None:
            inputs = [] if full is None else [list(full.chunk(self.size))]
            listening.scatter([own], inputs, dist.ScatterOptions())
        if full is not None:
            own.copy_(self.own_part(full))
        parts = {} if self.rank == 0 else {0: own}
        part = Part(full, parts, self.size * own.nbytes, self.rank * own.nbytes)
        self._post(Kind.SCATTER, part).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        data = _pickled(value)
        every: dict[int, Any] = {self.rank: value}

        def take(parts: Parts) -> None:
            every.update({rank: _unpickled(data) for rank, data in parts.items()})

        part = Part(data, dict.fromkeys(self._peers, data), None, take=take)
        self._post(Kind.OBJECT, part).wait()
        return [every[rank] for rank in range(self.size)]

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        if (listening := self._listening()) is not None:
            listening.alltoall_base(received, sent, [], [])
        own = self.own_part(sent)
        parts = _by_rank(received, self.size)
        parts.pop(self.rank).copy_(own)
        part = Part(sent, parts, sent.nbytes, self.rank * own.nbytes)
        return self._post(Kind.ALL_TO_ALL, part)

    def _post(self, kind: Kind, part: Part) -> Pending:
        return self._post_each(kind, [part])

    def _post_each(self, kind: Kind, parts: Iterable[Part]) -> Pending:
        """Issues one collective for each part."""
        return self._issue_each([partial(SharedCollective, self._channel, kind, part) for part in parts])

    def _issue_each(self, starts: list[Callable[[], Work]]) -> Pending:
        if not self._channel.has_room(len(starts)):
            InFlight([Room(self._channel, len(starts))], self._watch).wait()
        return self._issue(self._gather_lane, lambda *_: [start() for start in starts])

    def _listening(self) -> dist.ProcessGroup | None:
        """Returns what to call in the group's place, and may spoil what it is given; None if nobody listens.

        `CommDebugMode` and the like count c10d's operators, which no collective here calls.
        """
        return _make_stand_in(self.rank, self.size) if current_dispatch_mode() is not None else None


@cache
def _make_stand_in(rank: int, size: int) -> dist.ProcessGroup:
    """Makes a group that carries nothing."""
    group = dist.ProcessGroup(HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def _by_rank(full: torch.Tensor, size: int) -> Parts:
    """Returns each rank's part of an evenly sharded 1-D tensor."""
    return dict(enumerate(full.view(size, full.numel() // size).unbind()))


def _reduce(by_rank: Parts, target: torch.Tensor, operation: Callable[..., torch.Tensor]) -> None:
    """Combines all ranks' tensors, in the order of the ranks, into one that may be that of a rank.

    Where theirs are of another dtype, it is done in that of the target.
    """
    sources = [by_rank[rank] for rank in sorted(by_rank)]
    if target.is_floating_point() and target.element_size() == 1:  # torch does not compute with them
        target.copy_(reduce(operation, [source.float() for source in sources]))
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


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(bytes(data.tolist()))
