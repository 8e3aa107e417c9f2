"""Memory that the ranks of one host share: one anonymous file per process, of which it hands out pieces.

Nothing here has a name in a file system, so nothing can be left behind, and the size of `/dev/shm` does not
matter. A peer reaches the file through `/proc`, which the kernel grants to processes of the same user only.
Pages that are there already are many times faster than fresh ones, so pieces are reused, lowest first. The
file grows when none is free that is large enough (`_comm/shared_memory/mapped_file.py`).

A file may be mapped twice. What a process writes to the one map all see; what it writes to the other is its
own, on copies of the pages that the kernel makes. So ranks can compute with one copy of the parameters, and a
module that writes to them changes nothing for the others.
"""

from __future__ import annotations

import mmap
import os
import resource
import secrets
import weakref
from collections import deque
from collections.abc import Callable

import torch

from fsdp_wrap._comm.buffer import Buffer
from fsdp_wrap._comm.shared_memory.mapped_file import Descriptor, MappedFile
from fsdp_wrap._core import format_bytes

HEADER = mmap.PAGESIZE
"""Bytes before those of a buffer's piece, where its users leave word."""

_KEPT = 1 << 30
"""Up to so many bytes stay when nobody uses them; pages beyond go back to the host."""

_LEAST, _MOST = 16 << 20, 1 << 30
"""Bytes with which a file begins, and by which it grows at most unless a piece is larger: it doubles."""

_WORD_BYTES = 16

IsRead = Callable[[], bool]
"""Whether all have read something in this memory that were to."""

_OF_FILE = 0x20  # in the highest byte of an entry of a page map: not a copy of the process's own
_THERE = 0xC0  # likewise: in memory, or swapped out


class Memory(MappedFile):
    """A file of memory as this process has mapped it, in pieces of which a part may be leased."""

    def tensor(self, begin: int, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns some of the memory as a 1-D tensor."""
        mapped, offset = self.at(begin)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=offset)

    def words(self, begin: int, number: int) -> memoryview:
        """Returns some of the memory as integers of 8 bytes, each of which is written at once."""
        mapped, offset = self.at(begin)
        return memoryview(mapped)[offset : offset + 8 * number].cast("Q")

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns what follows the header of a piece."""
        mapped, begin = self.at(lease.begin + HEADER)
        view = memoryview(mapped)[begin : begin + nbytes]  # lives as long as the storage's memory
        weakref.finalize(view, _drop, lease).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


class PrivateMap(Memory):
    """Shows a file of memory as all have written it; what is written here is this process's own.

    Args:
        file: The file.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self, file: Descriptor) -> None:
        super().__init__(file, private=True)
        self._pages = Descriptor(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))

    def leased(self, nbytes: int, lease: Lease) -> torch.UntypedStorage:
        """Returns what follows the header of a piece, without what this process has written there before."""
        begin, length = lease.begin + HEADER, _whole_pages(nbytes)
        page, pages = self.address(begin) // mmap.PAGESIZE, length // mmap.PAGESIZE
        entries = os.pread(self._pages.number, 8 * pages, 8 * page)
        if any(kind & _THERE and not kind & _OF_FILE for kind in set(entries[7::8])):
            mapped, offset = self.at(begin)
            mapped.madvise(mmap.MADV_DONTNEED, offset, length)
        return super().leased(nbytes, lease)


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

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._end(self.begin)


def _drop(lease: Lease) -> None:
    """Does nothing: a finalizer that waits to call it holds the lease until then."""


class SharedMemory(Memory):
    """This process's memory, which peers can read.

    Attributes:
        private: Of the same file; None where the host does not allow that.
        word: What the file begins with, so that a peer knows it has found the right one.

    Raises:
        OSError: If the host does not allow it, or this process may not have much address space.
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
        """Returns the offset of a piece that nobody uses: the lowest that is large enough.

        Raises:
            RuntimeError: If there is none, and the host does not allow more.
        """
        if self._given_back:
            self._collect()
        nbytes += -nbytes % mmap.PAGESIZE
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                self._taken[begin] = begin + nbytes
                return begin
        self._grow(nbytes)
        return self.take(nbytes)

    def _grow(self, nbytes: int) -> None:
        """Makes the file longer, by enough for a piece of some size.

        Raises:
            RuntimeError: If the host does not allow it.
        """
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
        """Notes that others may read a piece, which is not reused before they have."""
        self._posted.setdefault(begin, []).append(is_read)

    def give_back(self, begin: int) -> None:
        """Ends this process's use of a piece."""
        self._given_back.append(begin)

    def _collect(self) -> None:
        """Frees what was given back and has been read since."""
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
        """Makes one of a free piece and the next if they are adjacent, in one map."""
        if not 0 <= index < len(self._free) - 1:
            return
        (begin, middle), (other, end) = self._free[index : index + 2]
        if middle == other and middle not in self._grown:
            self._free[index : index + 2] = [(begin, end)]

    def lease(self, nbytes: int) -> Lease:
        """Returns the right to use a piece, with its header, which is given back when that ends."""
        return Lease(self.take(HEADER + nbytes), self._given_back.append)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the offset of the piece in use that a buffer's tensor lies in; None if in none."""
        begin = self.place(tensor.untyped_storage().data_ptr() - HEADER)
        return begin if begin in self._taken else None

    def offset(self, tensor: torch.Tensor) -> int:
        """Returns where a tensor begins that lies in this memory."""
        begin = self.place(tensor.data_ptr())
        assert begin is not None
        return begin


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
        file = Descriptor(os.open(f"/proc/{process}/fd/{door}", os.O_RDWR | os.O_CLOEXEC))
        if os.pread(file.number, _WORD_BYTES, 0) != word:
            raise OSError(f"process {process} is another one than was meant: in another container, say")
        super().__init__(file)
        self.private: PrivateMap | None = None

    def map_privately(self) -> None:
        """Maps the file privately as well.

        Raises:
            OSError: If the host does not allow it.
        """
        if self.private is None:
            self.private = PrivateMap(self._file)


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

    def free(self) -> bool:
        if self._without is None:
            return super().free()
        self._storage._swap_data_ptr_(self._without)  # type: ignore[attr-defined]
        self._without = None
        return True

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
    """Refuses to begin where a process may have only so much address space, and less than that is left of it.

    All that ranks share lies in the host's memory, so who may map as much as that does not lack any later.

    Raises:
        OSError: If it is so.
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


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
