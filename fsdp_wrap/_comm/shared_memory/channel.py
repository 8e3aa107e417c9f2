"""Data from rank to rank of a group whose ranks share a host.

Every rank numbers the collectives alike. For each it *posts* where in its memory its part lies. The others
read it there when they wait, and acknowledge; then the memory may be reused. Nobody waits for readers, so a
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
"""The most collectives in flight; to issue more, a rank waits until all have read the oldest."""

_SLOTS, _SLOT = 8, 1 << 13
"""Number and bytes of the slots for small tensors, which take no piece of memory each."""


class Kind(IntEnum):
    """The kinds of collectives."""

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
    """The memory in which one rank posts, and the others acknowledge.

    The first word counts the posts, the second is the number of the last announcement, and one for each rank
    of the group tells whether that has left. The last posts follow, each with its record (the kind of the
    collective, how many bytes lie where in the rank's memory) and, for each rank and the owner, the number
    of the last post in this place that it needs no more. Room for small tensors follows.
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
        """Returns the size of a board in bytes."""
        return cls.slots(ranks) + _SLOTS * _SLOT

    def clear(self) -> None:
        """Begins with nothing posted."""
        for index in range(len(self.words)):
            self.words[index] = 0

    def announce(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        """Writes the record of a post in advance."""
        self._write(number, kind, nbytes, begin)
        self.words[1] = number

    def is_announced(self, number: int, life: Life) -> bool:
        """Whether a record was written in advance, after a short look."""
        return wait_until(self._announced, self.address + 8, number, life, time.perf_counter(), 0.0)

    def _write(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        words, place = self.words, self._first + number % _POSTS * self._stride
        words[place], words[place + 1], words[place + 2] = kind, nbytes, begin

    def post(self, number: int, kind: Kind, nbytes: int, begin: int) -> None:
        """Writes a record, counts it, and wakes the waiting ranks."""
        self._write(number, kind, nbytes, begin)
        self.words[0] = number
        wake(self.address)

    def record(self, number: int) -> tuple[int, int, int]:
        """Returns the kind of a post, how many bytes it has, and where they lie."""
        words, place = self.words, self._first + number % _POSTS * self._stride
        return words[place], words[place + 1], words[place + 2]

    def acknowledge(self, number: int, rank: int) -> None:
        """Tells the owner that a rank has read a post."""
        self.words[self._first + number % _POSTS * self._stride + 3 + rank] = number

    def is_read(self, number: int, rank: int) -> bool:
        """Whether a rank has read a post."""
        return self.words[self._first + number % _POSTS * self._stride + 3 + rank] >= number

    def is_over(self, number: int) -> bool:
        """Whether all ranks have read a post, the owner included."""
        begin = self._first + number % _POSTS * self._stride + 3
        return min(self.words[begin : begin + self._ranks]) >= number

    def leave(self, rank: int) -> None:
        """Tells the owner that a rank will neither read nor write here any more."""
        self.words[2 + rank] = 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank will neither read nor write here any more."""
        return bool(self.words[2 + rank])


class Peer(NamedTuple):
    """The board and the process of another rank."""

    board: Board
    life: Life


class Readers(NamedTuple):
    """The peers that read a rank's board, and whether their processes run."""

    board: Board
    lives: dict[int, Life]

    def have_read(self, number: int) -> bool:
        """Whether all readers have read a post, or are gone."""
        if self.board.is_over(number):
            return True
        return all(self.board.is_read(number, rank) or self.is_gone(rank) for rank in self.lives)

    def are_gone(self) -> bool:
        """Whether nobody will read any more."""
        return all(map(self.is_gone, self.lives))

    def is_gone(self, rank: int) -> bool:
        """Whether a reader has left, or ended."""
        return self.board.has_left(rank) or self.lives[rank].ended


class Channel:
    """The boards and memories of the ranks of one group.

    `lends` tells whether all ranks can compute with memory that one lends; `readers` are the peers as readers
    of this rank's board.
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
        self._shown = [0] * _SLOTS  # by slot, the collective that its tensor belongs to
        self._process = os.getpid()
        left = partial(_leave, self._process, rank, [peer.board for peer in peers.values()])
        weakref.finalize(self, left, memory, begin, self.readers).atexit = False

    def has_room(self, more: int) -> bool:
        """Whether so many more collectives may be issued now.

        Raises a RuntimeError if this rank must wait for an earlier one first.
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

        `in_place` lets them read it where it lies, if that is in a piece of this process's memory; it must
        not change then before the piece is given back. Raises a RuntimeError in a fork.
        """
        if tensor is None or not (nbytes := tensor.nbytes):
            return self.post(kind, 0, 0)
        return self.post(kind, nbytes, self.show(tensor, in_place))

    def post(self, kind: Kind, nbytes: int, begin: int) -> int:
        """Posts so many bytes of this rank's memory; returns the number of the collective."""
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
        """Returns where others may read a tensor, or a copy of it, once that is posted, as the next."""
        self.check_process()  # a fork's writes would reach its parent
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
        """Waits until all peers have posted."""
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

        `nbytes` is the expected size; None for any. Raises a RuntimeError if the rank takes part in another
        collective.
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
        """Acknowledges a collective on all boards."""
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
