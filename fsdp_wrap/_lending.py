"""Memory of one rank with which all ranks of a host compute, in place of a copy for each.

The first rank lends a piece for each gather. All write their parts there, and see the whole through a private
map. When the last one frees it, the piece is free for the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fsdp_wrap._channel import LENDER, Channel, Kind, Peer, Record
from fsdp_wrap._shared_collective import Collective
from fsdp_wrap._shared_memory import HEADER, Lease, SharedBuffer

__all__ = ["CommonGather", "Lending", "Lent"]


class Lending:
    """What is lent between the ranks of a channel.

    The header of a piece has a word for each rank: it is written when that one has returned the piece.

    Args:
        channel: The way between them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lends = channel.rank == LENDER
        self._memory = channel.memory if self._lends else channel.peers[LENDER].memory

    @property
    def possible(self) -> bool:
        """Whether all ranks can take part, and there is a word for each."""
        return self._channel.lends and 8 * self._channel.size <= HEADER

    def lease(self, number: int, nbytes: int) -> Lease | None:
        """Returns the right to the piece for a gather to come; None if the lender has not announced it yet.

        Raises:
            RuntimeError: If the lender takes part in something else, or in a fork.
        """
        self._channel.check_process()
        if self._lends:
            return self._lend(number, nbytes)
        lender = self._channel.peers[LENDER]
        return self.borrow(number, nbytes) if lender.board.is_announced(number, lender.life) else None

    def _lend(self, number: int, nbytes: int) -> Lease:
        channel = self._channel
        lease = channel.memory.lease(nbytes)
        users = channel.memory.words(lease.begin, channel.size)
        for rank in channel.peers:
            users[rank] = 0
        channel.memory.note(lease.begin, Lent(users, channel.peers))
        channel.announce(number, Record(Kind.COMMON_GATHER, nbytes, lease.begin))
        return lease

    def borrow(self, number: int, nbytes: int) -> Lease:
        """Returns the right to the piece for a gather that the lender has issued.

        Raises:
            RuntimeError: If it takes part in something else.
        """
        record = self._channel.read(number, Kind.COMMON_GATHER, LENDER, nbytes)
        return Lease(record.begin, self._return)

    def _return(self, begin: int) -> None:
        self._memory.words(begin, self._channel.size)[self._channel.rank] = 1

    def shared(self, lease: Lease, nbytes: int) -> torch.UntypedStorage:
        """Returns a piece so that all ranks see what is written there."""
        return self._memory.leased(nbytes, lease)

    def private(self, lease: Lease, nbytes: int) -> torch.UntypedStorage:
        """Returns a piece so that what is written there from now on only this rank sees."""
        assert self._memory.private is not None
        return self._memory.private.leased(nbytes, lease)

    def post(self, full: torch.Tensor, lease: Lease | None) -> int:
        """Posts that this rank has written its part; returns the number of the gather.

        Args:
            full: Where it is written.
            lease: Of the piece, if that is there; else it is in this process's memory.
        """
        channel = self._channel
        if lease is None:
            begin = channel.show(full, in_place=True) + channel.rank * (full.nbytes // channel.size)
        else:
            begin = lease.begin if self._lends else 0
        return channel.post_record(Record(Kind.COMMON_GATHER, full.nbytes, begin))

    def missing(self, number: int, lease: Lease, nbytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Gives the parts of a piece that were written elsewhere, each with where that is.

        Raises:
            RuntimeError: If a rank takes part in something else.
        """
        channel = self._channel
        part = nbytes // channel.size
        mine = channel.memory, channel.posted(number)
        others = {
            rank: (peer.memory, channel.read(number, Kind.COMMON_GATHER, rank, nbytes))
            for rank, peer in channel.peers.items()
        }
        for rank, (memory, record) in {**others, channel.rank: mine}.items():
            if rank != LENDER and record.begin:
                target = self._memory.tensor(lease.begin + HEADER + rank * part, part)
                yield target, memory.tensor(record.begin, part)


class Lent(NamedTuple):
    """A piece with which peers compute until they have returned it."""

    users: memoryview
    peers: dict[int, Peer]

    def is_read(self) -> bool:
        return all(self.users[rank] or peer.life.ended for rank, peer in self.peers.items())


class CommonGather(Collective):
    """A gather into a piece of memory with which all ranks compute, issued when this one's part is written.

    Who issues it before the lender has written its part elsewhere. Each rank copies such parts to the piece:
    the same bytes, so it does not matter that others may do so as well, or compute already.

    Args:
        channel: The way to the other ranks.
        lending: Between them.
        buffer: Is to hold what is gathered.
        lease: Of the piece, if the buffer lies there; else it lies in this process's memory.
    """

    def __init__(self, channel: Channel, lending: Lending, buffer: SharedBuffer, lease: Lease | None) -> None:
        self._lending, self._buffer, self._lease = lending, buffer, lease
        super().__init__(channel, lambda: lending.post(buffer.data, lease))

    def _take(self, number: int) -> None:
        buffer, lending = self._buffer, self._lending
        lease = self._lease or lending.borrow(number, buffer.nbytes)
        for part, written in lending.missing(number, lease, buffer.nbytes):
            part.copy_(written)
        buffer.hold(lending.private(lease, buffer.nbytes))
