"""Memory that the ranks of one host share: one anonymous file per process, from which it takes pieces.

Nothing here has a name in a file system, so nothing can be left behind, and the size of `/dev/shm` does not
matter. A peer reaches the file through `/proc`, which the kernel grants to processes of the same user only.
Touched pages are many times faster than fresh ones, so pieces are reused, lowest first. The file grows when
no free piece is large enough (`_comm/shared_memory/mapped_file.py`).

A file may be mapped twice. Writes to the one map are seen by all; writes to the private map are this
process's own, on copies of the pages that the kernel makes. So ranks can compute with one copy of the
parameters, and a module that writes to them changes nothing for the others.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from fsdp_wrap._comm.buffers import Buffer
from fsdp_wrap._comm.shared_memory.mapped_file import Descriptor, MappedFile
from fsdp_wrap._core import format_bytes, round_up

HEADER = mmap.PAGESIZE
"""Bytes in front of each piece, in which its users note their use."""

_KEPT = 1 << 30
"""Bytes that stay when nobody uses them; pages beyond go back to the host."""

_LEAST, _MOST = 16 << 20, 1 << 30
"""First size in bytes, and the most by which a file grows unless a piece is larger: it doubles."""

_WORD_BYTES = 16

IsRead = Callable[[], bool]
"""Whether all readers have read a piece."""

_OF_FILE = 0x20  # in the highest byte of an entry of a page map: not a copy of the process's own
_THERE = 0xC0  # likewise: in memory, or swapped out


class Memory(MappedFile):
    """A mapped file in pieces, of which a part may be leased."""

    def tensor(self, begin: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns a part of the memory as a 1-D tensor."""
        mapped, offset = self.at(begin)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=offset)

    def words(self, begin: int, number: int) -> memoryview:
        """Returns a part of the memory as integers of 8 bytes, each of which is written at once."""
        mapped, offset = self.at(begin)
        return memoryview(mapped)[offset : offset + 8 * number].cast("Q")

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns the storage behind the header of a piece."""
        mapped, begin = self.at(lease.begin + HEADER)
        view = memoryview(mapped)[begin : begin + nbytes]  # lives as long as the storage's memory
        weakref.finalize(view, _drop, lease).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


class PrivateMap(Memory):
    """A private map of a file: it shows the writes of all, and keeps this process's own to itself."""

    def __init__(self, file: Descriptor) -> None:
        super().__init__(file, private=True)
        self._pages = Descriptor(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns the storage behind the header of a piece, without this process's earlier writes."""
        begin, length = lease.begin + HEADER, round_up(nbytes, mmap.PAGESIZE)
        page, pages = self.address(begin) // mmap.PAGESIZE, length // mmap.PAGESIZE
        entries = os.pread(self._pages.number, 8 * pages, 8 * page)
        if any(kind & _THERE and not kind & _OF_FILE for kind in set(entries[7::8])):
            mapped, offset = self.at(begin)
            mapped.madvise(mmap.MADV_DONTNEED, offset, length)
        return super().leased(nbytes, lease)


class Lease:
    """The right to use a piece of memory, until the last storage there has gone.

    `end` is called with the offset of the piece then, in the process that made the lease.
    """

    def __init__(self, begin: int, end: Callable[[int], object]) -> None:
        self.begin = begin
        self._end = end
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._end(self.begin)


def _drop(lease: Lease) -> None:
    """Does nothing: a finalizer that waits to call it holds the lease until then."""


class SharedMemory(Memory):
    """The memory of this process, which it shares.

    Raises an OSError if the host does not allow it, or this process may not have much address space.
    """

    def __init__(self) -> None:
        _require_room(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        file = Descriptor(os.memfd_create("fsdp_wrap"))
        os.ftruncate(file.number, _LEAST)
        super().__init__(file)
        try:
            self.private: PrivateMap | None = PrivateMap(file)
        except OSError:
            self.private = None
        self.word = secrets.token_bytes(_WORD_BYTES)
        os.pwrite(file.number, self.word, 0)
        self._size = _LEAST
        self._grown: set[int] = set()  # where the file has ended, across which nothing may lie
        self._free = [(mmap.PAGESIZE, _LEAST)]  # sorted; those that are adjacent lie in several maps
        self._taken: dict[int, int] = {}  # from where to where
        self._posted: dict[int, list[IsRead]] = {}
        self._given_back: deque[int] = deque()  # which somebody may read still

    @property
    def door(self) -> int:
        """The descriptor through which peers reach the file."""
        return self._file.number

    def take(self, nbytes: int) -> int:
        """Returns the offset of the lowest free piece; raises a RuntimeError if the host allows no more."""
        nbytes = round_up(nbytes, mmap.PAGESIZE)
        with self._lock:
            if self._given_back:
                self._collect()
            begin = self._lowest(nbytes)
            if begin is None:
                self._grow(nbytes)
                begin = self._lowest(nbytes)
        assert begin is not None
        return begin

    def _lowest(self, nbytes: int) -> int | None:
        """Takes the lowest free piece, and returns its offset; None if there is none."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self._taken[begin] = begin + nbytes
                return begin
        return None

    def _grow(self, nbytes: int) -> None:
        """Makes the file longer, by enough for a piece; raises a RuntimeError if the host refuses."""
        begin, end = self._size, self._size + max(nbytes, min(self._size, _MOST))
        try:
            self.extend(end)
            os.ftruncate(self._file.number, end)  # now that nobody need take it back
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeError(
                f"no {nbytes} bytes are left of the memory that the ranks of this host share ({error}). Let "
                "this process have more address space (ulimit -v), or set FSDP_WRAP_SHARED_MEMORY=0 on all "
                "ranks"
            ) from error
        self._size = end
        self._grown.add(begin)
        self._free.append((begin, end))

    def note(self, begin: int, is_read: IsRead) -> None:
        """Keeps a piece from reuse until `is_read` returns True."""
        self._posted.setdefault(begin, []).append(is_read)

    def give_back(self, begin: int) -> None:
        """Ends this process's use of a piece."""
        self._given_back.append(begin)

    def _collect(self) -> None:
        """Frees pieces that were given back and have been read."""
        for _ in range(len(self._given_back)):
            begin = self._given_back.popleft()
            if all(is_read() for is_read in self._posted.get(begin, ())):
                self._posted.pop(begin, None)
                self._release(begin, self._taken.pop(begin))
            else:
                self._given_back.append(begin)

    def _release(self, begin: int, end: int) -> None:
        if end > _KEPT:
            first = max(begin, _KEPT)
            mapped, offset = self.at(first)
            mapped.madvise(mmap.MADV_REMOVE, offset, end - first)
        index = next((index for index, (other, _) in enumerate(self._free) if other > begin), len(self._free))
        self._free.insert(index, (begin, end))
        self._join(index)
        self._join(index - 1)

    def _join(self, index: int) -> None:
        """Joins a free piece and the next if they are adjacent, in one map."""
        if not 0 <= index < len(self._free) - 1:
            return
        (begin, middle), (other, end) = self._free[index : index + 2]
        if middle == other and middle not in self._grown:
            self._free[index : index + 2] = [(begin, end)]

    def lease(self, nbytes: int) -> Lease:
        """Leases a piece with its header."""
        return Lease(self.take(HEADER + nbytes), self._given_back.append)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset of the piece in use that a buffer's tensor lies in; None if in none."""
        begin = self.place(tensor.untyped_storage().data_ptr() - HEADER)
        return begin if begin in self._taken else None

    def offset(self, tensor: torch.Tensor) -> int:
        """Returns the offset of a tensor in this memory."""
        begin = self.place(tensor.data_ptr())
        assert begin is not None
        return begin


class PeerMemory(Memory):
    """The memory of another process: to read, and to write acknowledgements and requested parts.

    `word` is the beginning of the file, which tells that it is the one meant. Raises an OSError if it cannot
    be reached.
    """

    def __init__(self, process: int, door: int, word: bytes) -> None:
        file = Descriptor(os.open(f"/proc/{process}/fd/{door}", os.O_RDWR | os.O_CLOEXEC))
        if os.pread(file.number, _WORD_BYTES, 0) != word:
            raise OSError(f"process {process} is another one than was meant: in another container, say")
        super().__init__(file)
        self.private: PrivateMap | None = None

    def map_privately(self) -> None:
        """Maps the file privately as well; raises an OSError if the host does not allow it."""
        if self.private is None:
            self.private = PrivateMap(self._file)


class SharedBuffer(Buffer):
    """A buffer in this process's shared memory, or in memory that another process lends."""

    def __init__(self, numel: int, dtype: torch.dtype, memory: SharedMemory) -> None:
        super().__init__(numel, dtype, torch.device("cpu"))
        self._memory = memory
        self._without: torch.UntypedStorage | None = None  # the storage that swapped memory with ours

    @property
    def resizable(self) -> bool:
        return not self._left and (self._without is not None or super().resizable)

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
        """Moves the buffer to other memory."""
        self._storage._swap_data_ptr_(memory)  # type: ignore[attr-defined]
        if self._without is None:
            self._without = memory

    def free(self) -> bool:
        if self._without is None or self._left:
            return super().free()
        self._storage._swap_data_ptr_(self._without)  # type: ignore[attr-defined]
        self._without = None
        return True

    def keep_alone(self) -> None:
        if self._without is not None and self._memory.find(self.data) is None:
            piece = self._piece()
            piece.copy_(self._storage)
            self.hold(piece)


_own: dict[int, SharedMemory] = {}
_making = threading.Lock()


def own_memory() -> SharedMemory:
    """Returns this process's memory; raises an OSError if the host does not allow it."""
    process = os.getpid()
    if process not in _own:
        with _making:
            if process not in _own:  # another thread may have made it meanwhile
                _own.clear()  # a parent's
                _own[process] = SharedMemory()
    return _own[process]


def _require_room(nbytes: int) -> None:
    """Raises an OSError where address space is limited, and less is left than the host has memory.

    All that ranks share lies in the host's memory, so a process that may map as much as that lacks none
    later.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    if used + nbytes > limit:
        raise OSError(
            f"of the {format_bytes(limit)} of address space that this process may have (ulimit -v) less is "
            f"left than the host has memory, which is {format_bytes(nbytes)}"
        )
