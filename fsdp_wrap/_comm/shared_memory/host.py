"""The communicator of ranks that share a host: their collectives go through shared memory.

Sums are made in the order of the ranks, so they do not depend on who comes first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove, string_at
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.buffers import Buffer
from fsdp_wrap._comm.collectives import REDUCTIONS, combine
from fsdp_wrap._comm.groups import Ranks, listening
from fsdp_wrap._comm.lanes import Pending, Then
from fsdp_wrap._comm.process_group import SUM, GroupCommunicator, Op, Tensors
from fsdp_wrap._comm.shared_memory.channel import Channel, Kind
from fsdp_wrap._comm.shared_memory.collective import PostedCollective, Room
from fsdp_wrap._comm.shared_memory.lending import Lending
from fsdp_wrap._comm.shared_memory.memory import Lease, SharedBuffer
from fsdp_wrap._core.torch_private import number_of_dispatch_modes

_PIECE = 1 << 17
"""Bytes of a broadcast at a time: initialisation promises to hold no more than that twice."""

_SMALL = 1 << 14
"""Bytes up to which making a tensor of a part takes longer than copying it."""

Parts = dict[int, torch.Tensor]  # by rank


class HostCommunicator(GroupCommunicator):
    """A communicator through memory that the ranks of the group share.

    Left to the process group are other reductions, and gathers of parts: streams promise not to hold anything
    twice.
    """

    def __init__(self, ranks: Ranks, device: torch.device, channel: Channel) -> None:
        super().__init__(ranks, device)
        self._channel = channel
        self._lending = Lending(channel)

    @property
    def way(self) -> str:
        return "shared memory"

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        common = [buffer for buffer in buffers if isinstance(buffer, SharedBuffer)]
        if len(common) < len(buffers) or not self._lending.possible:
            return super().gather_into(buffers, fill)
        # With other tensors: counting modes may write to them, and other ranks write to lent memory.
        self._tell_of_gathers(torch.empty_like(buffer.data) for buffer in buffers)
        self._prepare(len(buffers))
        first = self._channel.next_number
        leases = [self._lending.lay(buffer, number) for number, buffer in enumerate(common, first)]
        fill()
        return _all([*map(self._gather_lent, common, leases)])

    def _gather_lent(self, buffer: SharedBuffer, lease: Lease | None) -> PostedCollective:
        number = self._lending.post(buffer.data, lease)
        return self._collective(number, partial(self._lending.complete, buffer, lease))

    def _collective(self, number: int, take: Callable[[int], object]) -> PostedCollective:
        return PostedCollective(self._watch, self._channel, number, take)

    def _prepare(self, number: int) -> None:
        """Waits until so many more collectives may be issued."""
        if self._reference() is None:
            self.require_group()
        if not self._channel.has_room(number):
            Room(self._watch, self._channel, number).wait()

    def all_gather(self, full: Tensors, fill: Callable[[], object]) -> Pending:
        self._tell_of_gathers(full)
        fill()
        self._prepare(len(full))
        return _all([*map(self._gather_one, full)])

    def _tell_of_gathers(self, full: Iterable[torch.Tensor]) -> None:
        if number_of_dispatch_modes():
            for tensor in full:
                listening(self.rank, self.size)._allgather_base(tensor, self.own_part(tensor))

    def _gather_one(self, full: torch.Tensor) -> PostedCollective:
        own = self.own_part(full)
        if (nbytes := own.nbytes) > _SMALL:
            parts = _by_rank(full, self.size)
            del parts[self.rank]
            return self._exchange(Kind.ALL_GATHER, own, nbytes, parts)
        number = self._channel.post_tensor(Kind.ALL_GATHER, own)
        return self._collective(number, partial(self._take_small, full, nbytes))

    def _take_small(self, full: torch.Tensor, nbytes: int, number: int) -> None:
        """Completes a gather of small parts."""
        begin = full.data_ptr()
        for rank, peer in self._channel.peers.items():
            _, there = self._channel.read(number, Kind.ALL_GATHER, rank, nbytes)
            memmove(begin + rank * nbytes, peer.board.memory.address(there), nbytes)

    def _exchange(
        self, kind: Kind, shown: torch.Tensor | None, nbytes: int, wanted: Parts, offset: int = 0
    ) -> PostedCollective:
        """Issues a collective in which each rank copies from what others show.

        `wanted` are the targets by rank; each of those ranks shows `nbytes`, of which this rank's share
        begins at `offset`.
        """

        def take(number: int) -> None:
            for rank, target in wanted.items():
                target.copy_(self._share(number, kind, rank, nbytes, offset, target))

        return self._collective(self._channel.post_tensor(kind, shown), take)

    def _share(
        self, number: int, kind: Kind, rank: int, nbytes: int, offset: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Returns this rank's share of the `nbytes` that another one shows."""
        _, begin = self._channel.read(number, kind, rank, nbytes)
        if not nbytes:
            return like
        return self._channel.peers[rank].board.memory.tensor(begin + offset, like.numel(), like.dtype)

    def _shares(
        self, number: int, kind: Kind, nbytes: int, offset: int, own: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns this rank's shares of what all ranks show, in their order."""
        return [
            own if rank == self.rank else self._share(number, kind, rank, nbytes, offset, own)
            for rank in range(self.size)
        ]

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        if number_of_dispatch_modes():
            for shard, source in zip(shards, full):
                listening(self.rank, self.size)._reduce_scatter_base(
                    shard, source, dist.ReduceScatterOptions()
                )
        self._prepare(len(full))
        return _all([*map(self._reduce_one, shards, full)])

    def _reduce_one(self, shard: torch.Tensor, full: torch.Tensor) -> PostedCollective:
        kind, nbytes, own = Kind.REDUCE_SCATTER, full.nbytes, self.own_part(full)

        def take(number: int) -> None:
            combine(self._shares(number, kind, nbytes, self.rank * own.nbytes, own), shard, torch.add)

        return self._collective(self._channel.post_tensor(kind, full, in_place=True), take)

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        if op not in REDUCTIONS:
            return super().all_reduce(tensors, op)
        if number_of_dispatch_modes():
            for tensor in tensors:
                listening(self.rank, self.size).allreduce([tensor])
        self._prepare(len(tensors))
        return _all([self._combine(tensor, REDUCTIONS[op]) for tensor in tensors])

    def _combine(self, tensor: torch.Tensor, operation: Callable[..., torch.Tensor]) -> PostedCollective:
        kind, row = Kind.ALL_REDUCE, tensor.detach().view(-1)

        def take(number: int) -> None:
            combine(self._shares(number, kind, row.nbytes, 0, row), row, operation)

        return self._collective(self._channel.post_tensor(kind, row), take)

    def broadcast(self, tensor: torch.Tensor) -> None:
        if number_of_dispatch_modes():
            listening(self.rank, self.size).broadcast([tensor])
        for piece in torch.split(tensor.detach().view(-1), max(1, _PIECE // tensor.element_size())):
            self._prepare(1)
            shown, wanted = (piece, {}) if self.rank == 0 else (None, {0: piece})
            self._exchange(Kind.BROADCAST, shown, piece.nbytes, wanted).wait()

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if number_of_dispatch_modes():
            outputs = [] if full is None else [list(full.chunk(self.size))]
            listening(self.rank, self.size).gather(outputs, [own], dist.GatherOptions())
        parts: Parts = {}
        if full is not None:
            parts = _by_rank(full, self.size)
            if own.data_ptr() != full.data_ptr():
                parts[0].copy_(own)
            del parts[0]
        self._prepare(1)
        self._exchange(Kind.GATHER, own if full is None else None, own.nbytes, parts).wait()

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        if number_of_dispatch_modes():
            inputs = [] if full is None else [list(full.chunk(self.size))]
            listening(self.rank, self.size).scatter([own], inputs, dist.ScatterOptions())
        if full is not None:
            own.copy_(self.own_part(full))
        wanted = {} if self.rank == 0 else {0: own}
        self._prepare(1)
        self._exchange(Kind.SCATTER, full, self.size * own.nbytes, wanted, self.rank * own.nbytes).wait()

    def all_gather_object(self, value: Any) -> list[Any]:
        every = [value] * self.size

        def take(number: int) -> None:
            for rank, peer in self._channel.peers.items():
                length, begin = self._channel.read(number, Kind.OBJECT, rank)
                every[rank] = pickle.loads(string_at(peer.board.memory.address(begin), length))

        self._prepare(1)
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._collective(self._channel.post_tensor(Kind.OBJECT, data), take).wait()
        return every

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        lengths: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Pending:
        if lengths is not None:
            return super().all_to_all(received, sent, lengths)
        if number_of_dispatch_modes():
            listening(self.rank, self.size).alltoall_base(received, sent, [], [])
        own = self.own_part(sent)
        parts = _by_rank(received, self.size)
        parts.pop(self.rank).copy_(own)
        self._prepare(1)
        return self._exchange(Kind.ALL_TO_ALL, sent, sent.nbytes, parts, self.rank * own.nbytes)


def _all(pending: list[PostedCollective]) -> Pending:
    return pending[0] if len(pending) == 1 else Then(pending)


def _by_rank(full: torch.Tensor, size: int) -> Parts:
    """Returns each rank's part of an evenly sharded 1-D tensor."""
    return dict(enumerate(full.view(size, full.numel() // size).unbind()))
