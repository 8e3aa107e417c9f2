"""Memory of one rank with which all ranks of a host compute, in place of a copy for each.

The first rank lends a piece for each gather. All write their parts there, and see the whole through a private
map. When the last one frees it, the piece is free for the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fsdp_wrap._comm.shared_memory.channel import LENDER, Channel, Kind, Readers, Record
from fsdp_wrap._comm.shared_memory.collective import Collective
from fsdp_wrap._comm.shared_memory.memory import HEADER, Lease, Memory, SharedBuffer

__all__ = ["CommonGather", "Lending", "Lent"]

_NOT_TAKEN, _TAKEN, _RETURNED = range(3)


class Lending:
    """What is lent between the ranks of a channel.

    The header of a piece has a word for each rank, which tells whether that one uses it.

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
            users[rank] = _NOT_TAKEN
        channel.memory.note(lease.begin, Lent(channel.readers, number, users))
        channel.announce(number, Record(Kind.COMMON_GATHER, nbytes, lease.begin))
        return lease

    def borrow(self, number: int, nbytes: int) -> Lease:
        """Returns the right to the piece for a gather that the lender has issued.

        Raises:
            RuntimeError: If it takes part in something else.
        """
        record = self._channel.read(number, Kind.COMMON_GATHER, LENDER, nbytes)
        self._note(record.begin, _TAKEN)
        return Lease(record.begin, lambda begin: self._note(begin, _RETURNED))

    def _note(self, begin: int, word: int) -> None:
        self._memory.words(begin, self._channel.size)[self._channel.rank] = word

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
        for rank in range(channel.size):
            memory: Memory = channel.memory
            if rank == channel.rank:
                begin = channel.posted(number).begin
            else:
                memory = channel.peers[rank].memory
                begin = channel.read(number, Kind.COMMON_GATHER, rank, nbytes).begin
            if rank == LENDER:
                _check_same(begin, lease.begin)
            elif begin:
                target = self._memory.tensor(lease.begin + HEADER + rank * part, part)
                yield target, memory.tensor(begin, part)


def _check_same(posted: int, announced: int) -> None:
    if posted != announced:
        raise RuntimeError("the first rank of the group began a gather, failed, and began it anew")


class Lent(NamedTuple):
    """A piece with which all compute until they return it, or give up waiting for the gather."""

    readers: Readers
    number: int
    users: memoryview

    def is_read(self) -> bool:
        return all(map(self._is_done, self.readers.lives))

    def _is_done(self, rank: int) -> bool:
        word = self.users[rank]
        given_up = word == _NOT_TAKEN and self.readers.board.is_read(self.number, rank)
        return word == _RETURNED or given_up or self.readers.is_gone(rank)


class CommonGather(Collective):
    """A gather into a piece of memory with which all ranks compute, issued when this one's part is written.

    A rank that is ahead of the lender has written its part to memory of its own. Each rank copies such parts
    to the piece: the same bytes, so it does not matter that others may do so as well, or compute already.

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
