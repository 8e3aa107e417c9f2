"""Data from rank to rank of a group whose ranks share a host.

Every rank numbers the collectives alike. For each it *posts* where in its memory its part lies. The others
read it there when they wait, and say so; then the memory may be reused. Nobody waits for readers, so a
collective completes as soon as all ranks have posted it, in whatever order they wait.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from ctypes import memmove
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch

from fsdp_wrap._comm.shared_memory.memory import PeerMemory, SharedMemory
from fsdp_wrap._comm.shared_memory.signals import Life, wait_until, wake

LENDER = 0
"""The rank whose memory is lent (`_comm/shared_memory/lending.py`)."""

_POSTS = 512
"""So many collectives may be in flight; who issues more waits until all have read the oldest."""

_SLOTS, _SLOT = 8, 1 << 13
"""How many small tensors may be shown without taking a piece of memory for each, and of how many bytes."""


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


class Board:
    """Where one rank posts, and the others acknowledge.

    The first word counts the posts, the second tells which one was announced last, and then one for each
    rank of the group whether that has left. Of each of the last posts follow its record (the kind of the
    collective, how many bytes lie where in the rank's memory), and for each rank, the owner included, the
    number of the last one in this place that it needs no more. Room for small tensors follows.

    Args:
        memory: The rank's.
        begin: Where in it.
        ranks: Of the group.
    """

    def __init__(self, memory: SharedMemory | PeerMemory, begin: int, ranks: int) -> None:
        self.memory = memory
        self.address = memory.address(begin)
        self.words = memory.words(begin, self._length(ranks))
        self._ranks, self._first, self._stride = ranks, 2 + ranks, 3 + ranks
        self._announced = self.words[1:2]

    @classmethod
    def _length(cls, ranks: int) -> int:
        return 2 + ranks + _POSTS * (3 + ranks)

    @classmethod
    def slots(cls, ranks: int) -> int:
        """Returns where the room for small tensors begins."""
        return 8 * cls._length(ranks)

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Returns how much memory one takes."""
        return cls.slots(ranks) + _SLOTS * _SLOT

    def clear(self) -> None:
        """Begins with nothing posted."""
        for index in range(len(self.words)):
            self.words[index] = 0

    def announce(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        """Tells in advance what will be posted."""
        self._write(number, kind, nbytes, begin)
        self.words[1] = number

    def is_announced(self, number: int, life: Life) -> bool:
        """Whether something was told in advance, after a short look."""
        return wait_until(self._announced, self.address + 8, number, life, time.perf_counter(), 0.0)

    def _write(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        words, place = self.words, self._first + number % _POSTS * self._stride
        words[place], words[place + 1], words[place + 2] = kind, nbytes, begin

    def post(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        """Posts, and wakes who waits for it."""
        self._write(number, kind, nbytes, begin)
        self.words[0] = number
        wake(self.address)

    def record(self, number: int) -> tuple[int, int, int]:
        """Returns the kind of what was posted, how many bytes it has, and where they lie."""
        words, place = self.words, self._first + number % _POSTS * self._stride
        return words[place], words[place + 1], words[place + 2]

    def acknowledge(self, number: int, rank: int) -> None:
        """Lets the owner know that a rank has read."""
        self.words[self._first + number % _POSTS * self._stride + 3 + rank] = number

    def is_read(self, number: int, rank: int) -> bool:
        """Whether a rank has read."""
        return self.words[self._first + number % _POSTS * self._stride + 3 + rank] >= number

    def is_over(self, number: int) -> bool:
        """Whether all have read, and the owner has waited."""
        begin = self._first + number % _POSTS * self._stride + 3
        return min(self.words[begin : begin + self._ranks]) >= number

    def leave(self, rank: int) -> None:
        """Lets the owner know that a rank will neither read nor write here any more."""
        self.words[2 + rank] = 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank will neither read nor write here any more."""
        return bool(self.words[2 + rank])


class Peer(NamedTuple):
    """One other rank.

    Attributes:
        board: Where it posts, in its memory.
        life: Tells whether it runs.
    """

    board: Board
    life: Life


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
        if self.board.is_over(number):
            return True
        return all(self.board.is_read(number, rank) or self.is_gone(rank) for rank in self.lives)

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
        board: Where this one posts.
        readers: The other ranks, as they read what this one posts.
        next_number: The number of the collective that is to be issued next.
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
        self.board = Board(memory, begin, self.size)
        self.readers = Readers(self.board, {rank: peer.life for rank, peer in peers.items()})
        self.next_number = 1
        self._slots = begin + Board.slots(self.size)
        self._slots_address = memory.address(self._slots)
        self._shown = [0] * _SLOTS  # of what number the tensor in each slot is
        self._process = os.getpid()
        left = partial(_leave, self._process, rank, [peer.board for peer in peers.values()])
        weakref.finalize(self, left, memory, begin, self.readers).atexit = False

    def has_room(self, more: int) -> bool:
        """Whether so many more collectives may be issued.

        Raises:
            RuntimeError: If not before this rank has waited for an earlier one.
        """
        first = self.next_number - _POSTS
        for number in range(first, first + more):
            if number > 0 and not self.board.is_over(number):
                self._require_waited(number)
                if not self.readers.have_read(number):
                    return False
        return True

    def _require_waited(self, number: int) -> None:
        if not self.board.is_read(number, self.rank):
            raise RuntimeError(
                f"{_POSTS} collectives of a group were issued since one that rank "
                f"{self._members[self.rank]} has not waited for: wait for some before issuing more"
            )

    def post_tensor(self, kind: Kind, tensor: torch.Tensor | None, in_place: bool = False) -> int:
        """Shows the others a contiguous tensor, or a copy of it; returns the number of the collective.

        Args:
            kind: Of the collective.
            tensor: What they may read; None for nothing.
            in_place: Whether they may read it where it lies, if that is in a piece of this process's memory;
                it must not change then before the piece is given back.

        Raises:
            RuntimeError: In a fork.
        """
        if tensor is None or not (nbytes := tensor.nbytes):
            return self.post(kind, 0, 0)
        return self.post(kind, nbytes, self.show(tensor, in_place))

    def post(self, kind: Kind, nbytes: int, begin: int) -> int:
        """Posts; returns the number of the collective.

        Args:
            kind: Of the collective.
            nbytes: How much the others may read.
            begin: Where that lies in this rank's memory.

        Raises:
            RuntimeError: In a fork.
        """
        self.check_process()
        number = self.next_number
        self.next_number = number + 1
        self.board.post(number, kind, nbytes, begin)
        return number

    def check_process(self) -> None:
        """Raises a RuntimeError in a fork."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot communicate in its parent's groups: make a group in it"
            )

    def show(self, tensor: torch.Tensor, in_place: bool) -> int:
        """Returns where others may read a tensor, or a copy of it, once that is posted, as the next.

        Raises:
            RuntimeError: In a fork.
        """
        self.check_process()  # whose writes would reach its parent
        number, nbytes = self.next_number, tensor.nbytes
        slot = number % _SLOTS
        if nbytes <= _SLOT and self.board.is_over(self._shown[slot]):
            self._shown[slot] = number
            memmove(self._slots_address + slot * _SLOT, tensor.data_ptr(), nbytes)
            return self._slots + slot * _SLOT
        is_read = partial(self.readers.have_read, number)
        piece = self.memory.find(tensor) if in_place else None
        if piece is not None:
            self.memory.note(piece, is_read)
            return self.memory.offset(tensor)
        begin = self.memory.take(nbytes)
        self.memory.tensor(begin, tensor.numel(), tensor.dtype).copy_(tensor.view(-1))
        self.memory.note(begin, is_read)
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
        begin = 0.0
        for rank, (board, life) in self.peers.items():
            if board.words[0] < number:
                begin = begin or time.perf_counter()
                try:
                    if not wait_until(board.words, board.address, number, life, begin, limit):
                        return False
                except RuntimeError as error:
                    raise RuntimeError(f"rank {self._members[rank]} {error}") from None
        return True

    def read(self, number: int, kind: Kind, rank: int, nbytes: int | None = None) -> tuple[int, int]:
        """Returns how many bytes a rank has posted, and where they lie.

        Args:
            number: Of the collective.
            kind: What this rank takes for its kind.
            rank: Whose to read.
            nbytes: How many this rank expects; None for any.

        Raises:
            RuntimeError: If it takes part in something else.
        """
        other, length, begin = self.peers[rank].board.record(number)
        if other != kind or (length != nbytes and nbytes is not None):
            raise RuntimeError(
                f"ranks communicate differently: rank {self._members[self.rank]} takes part in {kind.name} "
                f"of {nbytes} bytes while rank {self._members[rank]} takes part in {Kind(other).name} of "
                f"{length}. All ranks of a group must run the same units, of the same shapes and dtypes"
            )
        return length, begin

    def release(self, number: int) -> None:
        """Ends the reading, or the wish to."""
        if os.getpid() == self._process:
            self.board.acknowledge(number, self.rank)
            for board, _ in self.peers.values():
                board.acknowledge(number, self.rank)


def _leave(
    process: int, rank: int, boards: list[Board], memory: SharedMemory, begin: int, readers: Readers
) -> None:
    """Ends a rank's part in a channel, unless in a fork."""
    if os.getpid() == process:
        for board in boards:
            board.leave(rank)
        memory.note(begin, readers.are_gone)  # then the board is free for something else
        memory.give_back(begin)
