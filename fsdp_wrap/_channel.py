"""Data from rank to rank of a group whose ranks share a host.

Every rank numbers the collectives alike. For each it *posts* where in its memory its part lies. The others
read it there when they wait, and say so; then the memory may be reused. Nobody waits for readers, so a
collective completes as soon as all ranks have posted it, in whatever order they wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import torch

from fsdp_wrap._shared_memory import Lease, PeerMemory, SharedMemory
from fsdp_wrap._signals import Life, wait_until, wake

__all__ = ["LENDER", "Board", "Channel", "Kind", "Lent", "Peer", "Post", "Record"]

LENDER = 0
"""The rank of whose memory all compute with pieces."""

_POSTS = 512
"""So many collectives may be in flight; who issues more waits until all have read the oldest."""


class Kind(IntEnum):
    """What a rank takes part in."""

    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    GATHER = 4
    SCATTER = 5
    OBJECT = 6
    ALL_TO_ALL = 7
    BROADCAST = 8
    COMMON_GATHER = 9


class Record(NamedTuple):
    """What a rank takes part in, and how many bytes lie where in its memory for the others."""

    kind: int
    nbytes: int
    begin: int


class Board:
    """Where one rank posts, and the others acknowledge.

    The first word counts the posts. Of each of the last ones follow a record, and for each rank of the group
    the number of the last post in this place that it has read.

    Args:
        memory: The rank's.
        begin: Where in it.
        ranks: Of the group.
    """

    def __init__(self, memory: SharedMemory | PeerMemory, begin: int, ranks: int) -> None:
        self._ranks = ranks
        self._stride = len(Record._fields) + ranks
        self.address = memory.address + begin
        self.words = memory.words(begin, self._length(ranks))

    @classmethod
    def _length(cls, ranks: int) -> int:
        return 1 + _POSTS * (len(Record._fields) + ranks)

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Returns how much memory one takes."""
        return 8 * cls._length(ranks)

    def _place(self, number: int) -> int:
        return 1 + number % _POSTS * self._stride

    def clear(self) -> None:
        """Begins with nothing posted."""
        for index in range(len(self.words)):
            self.words[index] = 0

    def post(self, number: int, record: Record) -> None:
        """Posts, and wakes who waits for it."""
        place = self._place(number)
        self.words[place], self.words[place + 1], self.words[place + 2] = record
        self.words[0] = number
        wake(self.address)

    def record(self, number: int) -> Record:
        """Returns what was posted."""
        place = self._place(number)
        return Record(*self.words[place : place + 3])

    def acknowledge(self, number: int, rank: int) -> None:
        """Lets the owner know that a rank has read."""
        self.words[self._place(number) + 3 + rank] = number

    def is_read(self, number: int, rank: int) -> bool:
        """Whether a rank has read."""
        return self.words[self._place(number) + 3 + rank] >= number


class Peer:
    """One other rank.

    Attributes:
        memory: Where its data lie.
        board: Where it posts.
        life: Tells whether it runs.
    """

    def __init__(self, memory: PeerMemory, board: Board, life: Life) -> None:
        self.memory, self.board, self.life = memory, board, life


class Channel:
    """The way between the ranks of one group.

    Args:
        rank: This one.
        memory: Its memory.
        begin: Of its board.
        peers: The other ranks.

    Attributes:
        memory: Of this rank.
        lender: Memory of the rank of whose pieces all compute with.
        private: The same, so that only this rank sees what it changes there.
    """

    def __init__(self, rank: int, memory: SharedMemory, begin: int, peers: dict[int, Peer]) -> None:
        self.peers, self.memory = peers, memory
        self._rank = rank
        self._board = Board(memory, begin, len(peers) + 1)
        self.lender = memory if rank == LENDER else peers[LENDER].memory
        assert self.lender.private is not None
        self.private = self.lender.private
        self._process = os.getpid()
        self._number = 0

    @property
    def next_number(self) -> int:
        """The number of the collective that is to be issued next."""
        return self._number + 1

    def has_room(self) -> bool:
        """Whether another collective may be issued.

        Raises:
            RuntimeError: If not before this rank has waited for an earlier one.
        """
        oldest = self._number + 1 - _POSTS
        if oldest <= 0:
            return True
        if not all(peer.board.is_read(oldest, self._rank) for peer in self.peers.values()):
            raise RuntimeError(
                f"{_POSTS} collectives of a group were issued since one that rank {self._rank} of it has not "
                "waited for: wait for some before issuing more"
            )
        return self.is_read(oldest)

    def is_read(self, number: int) -> bool:
        """Whether all peers have read, or need not read, what this rank has posted; dead ones do not."""
        return all(
            self._board.is_read(number, rank) or peer.life.ended for rank, peer in self.peers.items()
        )

    def post(self, kind: Kind, tensor: torch.Tensor | None, in_place: bool = False) -> int:
        """Shows the others a contiguous tensor, or a copy of it; returns the number of the collective.

        Args:
            kind: Of the collective.
            tensor: What they may read; None for nothing.
            in_place: Whether they may read it where it lies, if that is in a piece of this process's memory;
                it must not change then before the piece is given back.

        Raises:
            RuntimeError: In a fork.
        """
        self._count()
        begin, nbytes = 0, 0
        if tensor is not None and tensor.numel() > 0:
            begin, nbytes = self._shown(tensor, in_place), tensor.nbytes
        self._board.post(self._number, Record(kind, nbytes, begin))
        return self._number

    def _count(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot communicate in its parent's groups: make a group in it"
            )
        self._number += 1

    def _shown(self, tensor: torch.Tensor, in_place: bool) -> int:
        """Returns where others may read a tensor or a copy of it."""
        post = Post(self, self._number)
        piece = self.memory.find(tensor) if in_place else None
        if piece is not None:
            self.memory.note(piece, post)
            return tensor.data_ptr() - self.memory.address
        begin = self.memory.take(tensor.nbytes)
        self.memory.tensor(begin, tensor.numel(), tensor.dtype).copy_(tensor.view(-1))
        self.memory.note(begin, post)
        self.memory.give_back(begin)
        return begin

    def share(self, lease: Lease, nbytes: int) -> int:
        """Posts this rank's share in a common gather; returns the number of the collective.

        Args:
            lease: Of the piece to which this rank has written its part: its own if it is the lender.
            nbytes: Of all parts.

        Raises:
            RuntimeError: In a fork.
        """
        self._count()
        if self._rank == LENDER:
            users = self.memory.words(lease.begin, len(self.peers) + 1)
            for rank in self.peers:
                users[rank] = 0
            self.memory.note(lease.begin, Lent(users, self.peers))
        self._board.post(self._number, Record(Kind.COMMON_GATHER, nbytes, lease.begin))
        return self._number

    def borrow(self, number: int, nbytes: int) -> Lease:
        """Returns the piece that the lender has posted.

        Raises:
            RuntimeError: If it takes part in something else.
        """
        record = self.read(number, Kind.COMMON_GATHER, LENDER, nbytes)
        return Lease(record.begin, self._return)

    def _return(self, begin: int) -> None:
        self.peers[LENDER].memory.words(begin, len(self.peers) + 1)[self._rank] = 1

    def arrived(self, number: int, limit: float, ranks: Iterable[int] | None = None) -> bool:
        """Waits until all peers, or some, have posted.

        Args:
            number: Of the collective.
            limit: Seconds to wait at most.
            ranks: Of whom.

        Raises:
            RuntimeError: If a rank has ended.
        """
        for rank in self.peers if ranks is None else ranks:
            peer = self.peers[rank]
            try:
                if not wait_until(peer.board.words, peer.board.address, number, peer.life, limit):
                    return False
            except RuntimeError as error:
                raise RuntimeError(f"rank {rank} of the group {error}") from None
        return True

    def read(self, number: int, kind: Kind, rank: int, nbytes: int | None = None) -> Record:
        """Returns what a rank has posted.

        Raises:
            RuntimeError: If it takes part in something else.
        """
        record = self.peers[rank].board.record(number)
        if record.kind != kind or nbytes not in (None, record.nbytes):
            raise RuntimeError(
                f"ranks communicate differently: this one takes part in {kind.name} of {nbytes} bytes while "
                f"rank {rank} of the group takes part in {Kind(record.kind).name} of {record.nbytes}"
            )
        return record

    def release(self, number: int) -> None:
        """Ends the reading, or the wish to."""
        if os.getpid() == self._process:
            for peer in self.peers.values():
                peer.board.acknowledge(number, self._rank)


class Lent(NamedTuple):
    """A piece that peers compute with, each until it writes its word."""

    users: memoryview
    peers: dict[int, Peer]

    def is_read(self) -> bool:
        return all(self.users[rank] or peer.life.ended for rank, peer in self.peers.items())


class Post(NamedTuple):
    """Something posted: `is_read` tells whether all have read it."""

    channel: Channel
    number: int

    def is_read(self) -> bool:
        return self.channel.is_read(self.number)
