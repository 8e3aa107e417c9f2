"""Memory that the ranks of one host share: one anonymous file per process, of which it hands out pieces.

Nothing here has a name in a file system, so nothing can be left behind, and the size of `/dev/shm` does not
matter. A peer reaches the file through `/proc`, which the kernel grants to processes of the same user only.
Pages that are there already are many times faster than fresh ones, so pieces are reused, lowest first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref
from typing import Protocol

import torch

from fsdp_wrap._resizable import Buffer

__all__ = ["Descriptor", "PeerMemory", "Posted", "SharedBuffer", "SharedMemory", "own_memory"]

_KEPT = 1 << 30
"""Up to so many bytes stay when nobody uses them; pages beyond go back to the host."""

_WORD_BYTES = 16


class Descriptor:
    """A file descriptor that is closed with its last user.

    Attributes:
        number: What the system calls take.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class Posted(Protocol):
    """Something in this memory that other ranks may be reading."""

    def is_read(self) -> bool:
        """Whether all have read it that were to."""
        ...


class SharedMemory:
    """This process's memory, which peers can read.

    Its size is that of the host's memory, of which only what was written to takes any.

    Attributes:
        door: Descriptor through which peers reach the file.
        word: What the file begins with, so that a peer knows it has found the right one.
        address: Where the file begins in this process.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self) -> None:
        self.door = Descriptor(os.memfd_create("fsdp_wrap"))
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self.door.number, size)
        self._map = mmap.mmap(self.door.number, size)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.word = secrets.token_bytes(_WORD_BYTES)
        self._map[:_WORD_BYTES] = self.word
        self._free = [(mmap.PAGESIZE, size)]  # sorted, and no two of them adjacent
        self._taken: dict[int, int] = {}  # from where to where
        self._posted: dict[int, list[Posted]] = {}
        self._unread: list[int] = []  # given back, but somebody may read still

    def take(self, nbytes: int) -> int:
        """Returns the offset of a piece that nobody uses: the lowest that is large enough.

        Raises:
            RuntimeError: If there is none.
        """
        if self._unread:
            self._collect()
        nbytes = _whole_pages(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self._taken[begin] = begin + nbytes
                return begin
        raise RuntimeError(f"no {nbytes} bytes are left of the memory that the ranks of this host share")

    def note(self, begin: int, posted: Posted) -> None:
        """Notes that others may read a piece, which is not reused before they have."""
        self._posted.setdefault(begin, []).append(posted)

    def give_back(self, begin: int) -> None:
        """Ends this process's use of a piece."""
        if begin in self._posted:
            self._unread.append(begin)
        else:
            self._release(begin, self._taken.pop(begin))

    def _collect(self) -> None:
        """Frees what was given back and has been read since."""
        waiting, self._unread = self._unread, []
        for begin in waiting:
            if all(posted.is_read() for posted in self._posted[begin]):
                del self._posted[begin]
                self._release(begin, self._taken.pop(begin))
            else:
                self._unread.append(begin)

    def _release(self, begin: int, end: int) -> None:
        if end > _KEPT:
            first = max(begin, _KEPT)
            self._map.madvise(mmap.MADV_REMOVE, first, end - first)
        index = next((index for index, (other, _) in enumerate(self._free) if other > begin), len(self._free))
        self._free.insert(index, (begin, end))
        self._join(index)
        self._join(index - 1)

    def _join(self, index: int) -> None:
        """Makes one of a free piece and the next if they are adjacent."""
        if 0 <= index < len(self._free) - 1 and self._free[index][1] == self._free[index + 1][0]:
            self._free[index : index + 2] = [(self._free[index][0], self._free[index + 1][1])]

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset of the piece in use that a tensor lies in; None if in none."""
        begin = tensor.untyped_storage().data_ptr() - self.address  # a buffer's storage is one piece
        return begin if begin in self._taken else None

    def tensor(self, begin: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns some of the memory as a 1-D tensor."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)

    def words(self, begin: int, number: int) -> memoryview:
        """Returns some of the memory as integers of 8 bytes, each of which is written at once."""
        return memoryview(self._map)[begin : begin + 8 * number].cast("Q")


class PeerMemory:
    """The memory of another process, to read, but for the words by which that is acknowledged.

    Args:
        process: Its id.
        door: Descriptor of the file, in that process.
        word: What the file begins with.

    Attributes:
        address: Where the file begins in this process.

    Raises:
        OSError: If it cannot be reached.
    """

    def __init__(self, process: int, door: int, word: bytes) -> None:
        with open(f"/proc/{process}/fd/{door}", "r+b") as file:
            if os.pread(file.fileno(), _WORD_BYTES, 0) != word:
                raise OSError(f"process {process} is another one than was meant: in another container, say")
            self._map = mmap.mmap(file.fileno(), 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def tensor(self, begin: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns some of the memory as a 1-D tensor, not to be written to."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)

    def words(self, begin: int, number: int) -> memoryview:
        """Returns some of the memory as integers of 8 bytes, each of which is written at once."""
        return memoryview(self._map)[begin : begin + 8 * number].cast("Q")


class SharedBuffer(Buffer):
    """A buffer that takes its memory from what this process shares."""

    def __init__(self, numel: int, dtype: torch.dtype, memory: SharedMemory) -> None:
        super().__init__(numel, dtype, torch.device("cpu"))
        self._memory = memory
        self._begin = -1
        self._without = self._storage  # what the storage was exchanged for

    @property
    def resizable(self) -> bool:
        return self._begin >= 0 or super().resizable

    def allocate(self) -> None:
        if self.allocated:
            return
        if self._memory is not _own.get(os.getpid()):  # a fork's writes would reach its parent
            super().allocate()
            return
        self._begin = self._memory.take(self.nbytes)
        self._without = self._memory.tensor(self._begin, self.nbytes).untyped_storage()
        self._storage._swap_data_ptr_(self._without)  # type: ignore[attr-defined]

    def free(self) -> None:
        if self._begin < 0:
            super().free()
            return
        self._storage._swap_data_ptr_(self._without)  # type: ignore[attr-defined]
        begin, self._begin = self._begin, -1
        self._memory.give_back(begin)


_own: dict[int, SharedMemory] = {}


def own_memory() -> SharedMemory:
    """Returns this process's memory.

    Raises:
        OSError: If the host does not allow it.
    """
    process = os.getpid()
    if process not in _own:
        _own.clear()  # a parent's
        _own[process] = SharedMemory()
    return _own[process]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
