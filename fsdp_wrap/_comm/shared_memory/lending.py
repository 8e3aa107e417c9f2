"""Memory of one rank with which all ranks of a host compute, in place of a copy for each.

The first rank lends a piece for each gather. All write their parts there, and see the whole through a private
map. When the last rank frees it, the piece is free for the next gather.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fsdp_wrap._comm.shared_memory.channel import LENDER, Channel, Kind, Readers
from fsdp_wrap._comm.shared_memory.memory import HEADER, Lease, SharedBuffer

_NOT_TAKEN, _TAKEN, _RETURNED = range(3)


class Lending:
    """The pieces that the first rank of a channel lends.

    The header of a piece has a word for each rank, which tells whether that one uses it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.possible = channel.lends and 8 * channel.size <= HEADER  # a word for each rank
        self._lends = channel.rank == LENDER
        self._memory = channel.memory if self._lends else channel.peers[LENDER].board.memory

    def lay(self, buffer: SharedBuffer, number: int) -> Lease | None:
        """Moves a buffer to the piece for a gather to come, and returns the lease.

        Returns None if the lender has not announced the piece, so that the buffer has its own memory. Raises
        a RuntimeError if the lender takes part in something else, or in a fork.
        """
        channel, nbytes = self._channel, buffer.nbytes
        channel.check_process()
        if self._lends:
            lease = self._lend(number, nbytes)
        elif channel.peers[LENDER].board.is_announced(number, channel.peers[LENDER].life):
            lease = self._borrow(number, nbytes)
        else:
            buffer.allocate()
            return None
        buffer.hold(self._memory.leased(nbytes, lease))
        return lease

    def _lend(self, number: int, nbytes: int) -> Lease:
        channel = self._channel
        lease = channel.memory.lease(nbytes)
        users = channel.memory.words(lease.begin, channel.size)
        for rank in channel.peers:
            users[rank] = _NOT_TAKEN
        channel.memory.note(lease.begin, Lent(channel.readers, number, users).is_read)
        channel.board.announce(number, Kind.COMMON_GATHER, nbytes, lease.begin)
        return lease

    def _borrow(self, number: int, nbytes: int) -> Lease:
        """Returns the lease of the piece for a gather that the lender has issued."""
        _, begin = self._channel.read(number, Kind.COMMON_GATHER, LENDER, nbytes)
        self._note(begin, _TAKEN)
        return Lease(begin, lambda begin: self._note(begin, _RETURNED))

    def _note(self, begin: int, word: int) -> None:
        self._memory.words(begin, self._channel.size)[self._channel.rank] = word

    def post(self, full: torch.Tensor, lease: Lease | None) -> int:
        """Posts that this rank has written its part of `full`; returns the number of the gather."""
        channel = self._channel
        if lease is None:
            begin = channel.show(full, in_place=True) + channel.rank * (full.nbytes // channel.size)
        else:
            begin = lease.begin if self._lends else 0
        return channel.post(Kind.COMMON_GATHER, full.nbytes, begin)

    def complete(self, buffer: SharedBuffer, lease: Lease | None, number: int) -> None:
        """Copies to the piece what was written elsewhere, and lets the buffer lie there, for this rank alone.

        A rank that was ahead of the lender has written its part to memory of its own. Each rank copies such
        parts: the same bytes, so it does not matter that others may do so as well, or compute already. Raises
        a RuntimeError if a rank takes part in something else.
        """
        channel, nbytes = self._channel, buffer.nbytes
        lease = lease or self._borrow(number, nbytes)
        part = nbytes // channel.size
        for rank in range(channel.size):
            board = channel.board if rank == channel.rank else channel.peers[rank].board
            if rank != channel.rank:
                channel.read(number, Kind.COMMON_GATHER, rank, nbytes)
            _, _, begin = board.record(number)
            if rank == LENDER:
                _check_same(begin, lease.begin)
            elif begin:
                target = self._memory.tensor(lease.begin + HEADER + rank * part, part)
                target.copy_(board.memory.tensor(begin, part))
        assert self._memory.private is not None
        buffer.hold(self._memory.private.leased(nbytes, lease))


def _check_same(posted: int, announced: int) -> None:
    if posted != announced:
        raise RuntimeError(
            "the first rank of the group began a gather, failed, and began it anew, which the others cannot "
            "follow: see the error of that rank"
        )


class Lent(NamedTuple):
    """A lent piece, which is free when every rank has returned it, or given up waiting for the gather."""

    readers: Readers
    number: int
    users: memoryview

    def is_read(self) -> bool:
        return all(map(self._is_done, self.readers.lives))

    def _is_done(self, rank: int) -> bool:
        word = self.users[rank]
        given_up = word == _NOT_TAKEN and self.readers.board.is_read(self.number, rank)
        return word == _RETURNED or given_up or self.readers.is_gone(rank)
