"""Data from rank to rank of a group whose ranks share a host.

Every rank numbers the collectives alike. For each it *posts* where in its memory its part lies. The others
read it there when they wait, and say so; then the memory may be reused. Nobody waits for readers, so a
collective completes as soon as all ranks have posted it, in whatever order they wait.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch

from fsdp_wrap._comm.shared_memory.memory import PeerMemory, SharedMemory
from fsdp_wrap._comm.shared_memory.signals import Life, wait_until, wake

__all__ = ["LENDER", "Board", "Channel", "Kind", "Peer", "Post", "Readers", "Record"]

LENDER = 0
"""The rank whose memory is lent (`_comm/shared_memory/lending.py`)."""

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

    The first word counts the posts, the second tells which one was announced last, and then one for each
    rank of the group whether that has left. Of each of the last posts follow a record, and for each rank the
    number of the last one in this place that it has read.

    Args:
        memory: The rank's.
        begin: Where in it.
        ranks: Of the group.
    """

    def __init__(self, memory: SharedMemory | PeerMemory, begin: int, ranks: int) -> None:
        self._ranks = ranks
        self._first, self._stride = 2 + ranks, len(Record._fields) + ranks
        self.address = memory.address(begin)
        self.words = memory.words(begin, self._length(ranks))
        self._announced = self.words[1:2]

    @classmethod
    def _length(cls, ranks: int) -> int:
        return 2 + ranks + _POSTS * (len(Record._fields) + ranks)

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Returns how much memory one takes."""
        return 8 * cls._length(ranks)

    def _place(self, number: int) -> int:
        return self._first + number % _POSTS * self._stride

    def clear(self) -> None:
        """Begins with nothing posted."""
        for index in range(len(self.words)):
            self.words[index] = 0

    def announce(self, number: int, record: Record) -> None:
        """Tells in advance what will be posted."""
        self._write(number, record)
        self.words[1] = number

    def is_announced(self, number: int, life: Life) -> bool:
        """Whether something was told in advance, after a short look."""
        return wait_until(self._announced, self.address + 8, number, life, 0.0)

    def _write(self, number: int, record: Record) -> None:
        place = self._place(number)
        self.words[place], self.words[place + 1], self.words[place + 2] = record

    def post(self, number: int, record: Record) -> None:
        """Posts, and wakes who waits for it."""
        self._write(number, record)
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

    def leave(self, rank: int) -> None:
        """Lets the owner know that a rank will neither read nor write here any more."""
        self.words[2 + rank] = 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank will neither read nor write here any more."""
        return bool(self.words[2 + rank])


class Peer:
    """One other rank.

    Attributes:
        memory: Where its data lie.
        board: Where it posts.
        life: Tells whether it runs.
    """

    def __init__(self, memory: PeerMemory, board: Board, life: Life) -> None:
        self.memory, self.board, self.life = memory, board, life


class Readers(NamedTuple):
    """The peers that read what a rank posts.

    Attributes:
        board: Where it posts.
        lives: Tell whether they run, by rank.
    """

    board: Board
    lives: dict[int, Life]

    def have_read(self, number: int) -> bool:
        """Whether all have read, or need not read, what was posted."""
        for rank in self.lives:  # a generator would take longer
            if not self.board.is_read(number, rank) and not self.is_gone(rank):
                return False
        return True

    def are_gone(self) -> bool:
        """Whether nobody will read any more."""
        return all(map(self.is_gone, self.lives))

    def is_gone(self, rank: int) -> bool:
        """Whether one will not read any more: it has left, or ended."""
        return self.board.has_left(rank) or self.lives[rank].ended


class Channel:
    """The way between the ranks of one group.

    Args:
        members: The ranks, as the default group counts them.
        rank: This one's number among them.
        memory: Its memory.
        begin: Of its board.
        peers: The other ranks.
        lends: Whether all can compute with memory that one lends.

    Attributes:
        rank: This one.
        size: How many there are.
        memory: Of this one.
        peers: The other ranks.
        lends: Whether all can compute with memory that one lends.
        readers: The other ranks, as they read what this one posts.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        memory: SharedMemory,
        begin: int,
        peers: dict[int, Peer],
        lends: bool,
    ) -> None:
        self._members = members
        self.rank, self.size = rank, len(peers) + 1
        self.memory, self.peers, self.lends = memory, peers, lends
        self._board = Board(memory, begin, self.size)
        self.readers = Readers(self._board, {rank: peer.life for rank, peer in peers.items()})
        self._process = os.getpid()
        self._number = 0
        left = partial(_leave, self._process, rank, [peer.board for peer in peers.values()])
        weakref.finalize(self, left, memory, begin, self.readers).atexit = False

    @property
    def next_number(self) -> int:
        """The number of the collective that is to be issued next."""
        return self._number + 1

    def has_room(self, more: int) -> bool:
        """Whether so many more collectives may be issued.

        Raises:
            RuntimeError: If not before this rank has waited for an earlier one.
        """
        oldest = range(max(1, self._number + 1 - _POSTS), self._number + 1 + more - _POSTS)
        return all(map(self._is_over, oldest))

    def _is_over(self, number: int) -> bool:
        if not all(peer.board.is_read(number, self.rank) for peer in self.peers.values()):
            raise RuntimeError(
                f"{_POSTS} collectives of a group were issued since one that rank "
                f"{self._members[self.rank]} has not waited for: wait for some before issuing more"
            )
        return self.readers.have_read(number)

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
        if tensor is None or tensor.numel() == 0:
            return self.post_record(Record(kind, 0, 0))
        begin = self.show(tensor, in_place)
        return self.post_record(Record(kind, tensor.nbytes, begin))

    def post_record(self, record: Record) -> int:
        """Posts; returns the number of the collective.

        Raises:
            RuntimeError: In a fork.
        """
        self.check_process()
        self._number += 1
        self._board.post(self._number, record)
        return self._number

    def announce(self, number: int, record: Record) -> None:
        """Tells in advance what will be posted."""
        self._board.announce(number, record)

    def check_process(self) -> None:
        """Raises a RuntimeError in a fork."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot communicate in its parent's groups: make a group in it"
            )

    def posted(self, number: int) -> Record:
        """Returns what this rank has posted."""
        return self._board.record(number)

    def show(self, tensor: torch.Tensor, in_place: bool) -> int:
        """Returns where others may read a tensor, or a copy of it, once that is posted, as the next."""
        post = Post(self.readers, self.next_number)
        piece = self.memory.find(tensor) if in_place else None
        if piece is not None:
            self.memory.note(piece, post)
            return self.memory.offset(tensor)
        begin = self.memory.take(tensor.nbytes)
        self.memory.tensor(begin, tensor.numel(), tensor.dtype).copy_(tensor.view(-1))
        self.memory.note(begin, post)
        self.memory.give_back(begin)
        return begin

    def arrived(self, number: int, limit: float) -> bool:
        """Waits until all peers have posted.

        Args:
            number: Of the collective.
            limit: Seconds to wait at most.

        Raises:
            RuntimeError: If a rank has ended.
        """
        for rank, peer in self.peers.items():
            try:
                if not wait_until(peer.board.words, peer.board.address, number, peer.life, limit):
                    return False
            except RuntimeError as error:
                raise RuntimeError(f"rank {self._members[rank]} {error}") from None
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
                f"rank {self._members[rank]} takes part in {Kind(record.kind).name} of {record.nbytes}"
            )
        return record

    def release(self, number: int) -> None:
        """Ends the reading, or the wish to."""
        if os.getpid() == self._process:
            for peer in self.peers.values():
                peer.board.acknowledge(number, self.rank)


class Post(NamedTuple):
    """Something posted: `is_read` tells whether all have read it."""

    readers: Readers
    number: int

    def is_read(self) -> bool:
        return self.readers.have_read(self.number)


class _Left(NamedTuple):
    """A board that this rank has left: it is free for something else when all others have as well."""

    readers: Readers

    def is_read(self) -> bool:
        return self.readers.are_gone()


def _leave(
    process: int, rank: int, boards: list[Board], memory: SharedMemory, begin: int, readers: Readers
) -> None:
    """Ends a rank's part in a channel, unless in a fork."""
    if os.getpid() == process:
        for board in boards:
            board.leave(rank)
        memory.note(begin, _Left(readers))
        memory.give_back(begin)
