"""Memory that the ranks of one host share: one anonymous file per process, of which it hands out pieces.

Nothing here has a name in a file system, so nothing can be left behind, and the size of `/dev/shm` does not
matter. A peer reaches the file through `/proc`, which the kernel grants to processes of the same user only.
Pages that are there already are many times faster than fresh ones, so pieces are reused, lowest first.

A file may be mapped twice. What a process writes to the one map all see; what it writes to the other is its
own, on copies of the pages that the kernel makes. So ranks can compute with one copy of the parameters, and a
module that writes to them changes nothing for the others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from fsdp_wrap._resizable import Buffer

__all__ = [
    "HEADER",
    "Descriptor",
    "Lease",
    "Memory",
    "PeerMemory",
    "Posted",
    "PrivateMap",
    "SharedBuffer",
    "SharedMemory",
    "own_memory",
]

HEADER = mmap.PAGESIZE
"""Bytes before those of a buffer's piece, where its users leave word."""

_KEPT = 1 << 30
"""Up to so many bytes stay when nobody uses them; pages beyond go back to the host."""

_WORD_BYTES = 16

_NO_RESERVE = 0x4000  # MAP_NORESERVE: else the kernel may count all of the map as used
_OF_FILE = 0x20  # in the highest byte of an entry of a page map: not a copy of the process's own
_THERE = 0xC0  # likewise: in memory, or swapped out


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


class Memory:
    """A file of memory as this process has mapped it.

    Args:
        descriptor: Of the file.
        nbytes: Its size.

    Attributes:
        address: Where it begins in this process.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        _require_room(nbytes)
        self._map = mmap.mmap(descriptor, nbytes)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.address = _address(self._map)

    def tensor(self, begin: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns some of the memory as a 1-D tensor."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)

    def words(self, begin: int, number: int) -> memoryview:
        """Returns some of the memory as integers of 8 bytes, each of which is written at once."""
        return memoryview(self._map)[begin : begin + 8 * number].cast("Q")

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns what follows the header of a piece; what is written there all can read."""
        return lease.storage(self._map, nbytes)


class PrivateMap:
    """Shows a file of memory as all have written it; what is written here is this process's own.

    Args:
        descriptor: Of the file.
        nbytes: Its size.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        _require_room(nbytes)
        flags, both = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(descriptor, nbytes, flags=flags, prot=both)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._first_page = _address(self._map) // mmap.PAGESIZE
        self._pages = Descriptor(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns what follows the header of a piece, without what this process has written there before."""
        begin, length = lease.begin + HEADER, _whole_pages(nbytes)
        page, pages = self._first_page + begin // mmap.PAGESIZE, length // mmap.PAGESIZE
        entries = os.pread(self._pages.number, 8 * pages, 8 * page)
        if any(kind & _THERE and not kind & _OF_FILE for kind in set(entries[7::8])):
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)
        return lease.storage(self._map, nbytes)


class Lease:
    """The right to use a piece of memory, which ends with the last storage that lies there.

    Args:
        begin: Offset of the piece.
        end: Called with it then, in the process that made this.
    """

    def __init__(self, begin: int, end: Callable[[int], object]) -> None:
        self.begin = begin
        self._end = end
        self._process = os.getpid()

    def storage(self, mapped: mmap.mmap, nbytes: int) -> torch.UntypedStorage:
        """Returns what follows the header as a storage."""
        begin = self.begin + HEADER
        view = memoryview(mapped)[begin : begin + nbytes]  # lives as long as the storage's memory
        weakref.finalize(view, _drop, self).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._end(self.begin)


def _drop(lease: Lease) -> None:
    """Does nothing: a finalizer that waits to call it holds the lease until then."""


class SharedMemory(Memory):
    """This process's memory, which peers can read.

    Its size is that of the host's memory, of which only what was written to takes any.

    Attributes:
        private: Of the same file; None where the host does not allow that.
        door: Descriptor through which peers reach the file.
        word: What the file begins with, so that a peer knows it has found the right one.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self) -> None:
        self.door = Descriptor(os.memfd_create("fsdp_wrap"))
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self.door.number, size)
        super().__init__(self.door.number, size)
        try:
            self.private: PrivateMap | None = PrivateMap(self.door.number, size)
        except OSError:
            self.private = None
        self.word = secrets.token_bytes(_WORD_BYTES)
        self._map[:_WORD_BYTES] = self.word
        self._free = [(mmap.PAGESIZE, size)]  # sorted, and no two of them adjacent
        self._taken: dict[int, int] = {}  # from where to where
        self._posted: dict[int, list[Posted]] = {}
        self._unread: list[int] = []  # given back, but somebody may read still
        self._ended: deque[int] = deque()  # leases that ended, whenever that was

    def take(self, nbytes: int) -> int:
        """Returns the offset of a piece that nobody uses: the lowest that is large enough.

        Raises:
            RuntimeError: If there is none.
        """
        if self._unread or self._ended:
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
        while self._ended:
            self.give_back(self._ended.popleft())
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

    def lease(self, nbytes: int) -> Lease:
        """Returns the right to use a piece, with its header, which is given back when that ends."""
        return Lease(self.take(HEADER + nbytes), self._ended.append)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset of the piece in use that a buffer's tensor lies in; None if in none."""
        begin = tensor.untyped_storage().data_ptr() - self.address - HEADER
        return begin if begin in self._taken else None


class PeerMemory(Memory):
    """The memory of another process, to read, but for what it asks for and for words that acknowledge.

    Args:
        process: Its id.
        door: Descriptor of the file, in that process.
        word: What the file begins with.

    Attributes:
        private: Of the same file, once that was asked for.

    Raises:
        OSError: If it cannot be reached.
    """

    def __init__(self, process: int, door: int, word: bytes) -> None:
        self._path = f"/proc/{process}/fd/{door}"
        self.private: PrivateMap | None = None
        with open(self._path, "r+b") as file:
            if os.pread(file.fileno(), _WORD_BYTES, 0) != word:
                raise OSError(f"process {process} is another one than was meant: in another container, say")
            super().__init__(file.fileno(), os.fstat(file.fileno()).st_size)

    def map_privately(self) -> None:
        """Maps the file privately as well.

        Raises:
            OSError: If the host does not allow it.
        """
        if self.private is None:
            with open(self._path, "r+b") as file:
                self.private = PrivateMap(file.fileno(), os.fstat(file.fileno()).st_size)


class SharedBuffer(Buffer):
    """A buffer that takes its memory from what this process shares, or holds what another one lends."""

    def __init__(self, numel: int, dtype: torch.dtype, memory: SharedMemory) -> None:
        super().__init__(numel, dtype, torch.device("cpu"))
        self._memory = memory
        self._without: torch.UntypedStorage | None = None  # what the storage was exchanged for

    @property
    def resizable(self) -> bool:
        return self._without is not None or super().resizable

    def allocate(self) -> None:
        if self.allocated:
            return
        if self._memory is _own.get(os.getpid()):
            self.hold(self._piece())
        else:  # a fork's writes would reach its parent
            super().allocate()

    def _piece(self) -> torch.UntypedStorage:
        return self._memory.leased(self.nbytes, self._memory.lease(self.nbytes))

    def hold(self, memory: torch.UntypedStorage) -> None:
        """Lies in other memory from now on."""
        self._storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]
        if self._without is None:
            self._without = memory

    def free(self) -> None:
        if self._without is None:
            super().free()
            return
        self._storage._swap_data_ptr_(self._without)  # type: ignore[attr-defined]
        self._without = None

    def keep_alone(self) -> None:
        if self._without is not None and self._memory.find(self.tensor) is None:
            piece = self._piece()
            piece.copy_(self._storage)
            self.hold(piece)


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


def _require_room(nbytes: int) -> None:
    """Refuses a map that would take this process beyond half of the address space that it may have.

    Raises:
        OSError: If it would.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    if used + nbytes > limit // 2:
        raise OSError(
            f"a map of {nbytes >> 20} MiB would leave less than half of the {limit >> 20} MiB of address "
            "space that this process may have (ulimit -v)"
        )


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
