"""Memory that the ranks of one host share: anonymous files, of which the owner hands out pieces.

Nothing here has a name in a file system, so nothing can be left behind, and the size of `/dev/shm` does not
matter. A peer reaches the file through `/proc`, which the kernel grants to processes of the same user only.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch

from fsdp_wrap._signals import Descriptor

__all__ = ["PeerMemory", "SharedMemory"]

_KEPT = 64 << 20
"""Bytes that stay when nobody uses them: pages that are there already are far faster than fresh ones."""

_WORD_BYTES = 16


class SharedMemory:
    """This process's memory, which peers can read.

    Its size is that of the host's memory, of which only what was written to takes any.

    Attributes:
        door: Descriptor through which peers reach the file; to be closed once they have.
        word: What the file begins with, so that a peer knows it has found the right one.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self) -> None:
        self.door = Descriptor(os.memfd_create("fsdp_wrap"))
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self.door.number, size)
        self._map = mmap.mmap(self.door.number, size)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.word = secrets.token_bytes(_WORD_BYTES)
        self._map[:_WORD_BYTES] = self.word
        self._free = [(mmap.PAGESIZE, size)]  # sorted, and no two of them adjacent

    def take(self, nbytes: int) -> int:
        """Returns the offset of a piece that nobody uses: the lowest that is large enough.

        Raises:
            RuntimeError: If there is none.
        """
        nbytes = _whole_pages(nbytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[index : index + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin
        raise RuntimeError(f"no {nbytes} bytes are left of the memory that the ranks of this host share")

    def give_back(self, begin: int, nbytes: int) -> None:
        """Ends the use of a piece; beyond the first bytes of the file its pages go back to the host."""
        end = begin + _whole_pages(nbytes)
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

    def tensor(self, begin: int, nbytes: int) -> torch.Tensor:
        """Returns some of the bytes as a 1-D tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)


class PeerMemory:
    """The memory of another process, to read.

    Args:
        process: Its id.
        door: Descriptor of the file, in that process.
        word: What the file begins with.

    Raises:
        OSError: If it cannot be reached.
    """

    def __init__(self, process: int, door: int, word: bytes) -> None:
        with open(f"/proc/{process}/fd/{door}", "r+b") as file:  # torch warns of what is read-only
            if os.pread(file.fileno(), _WORD_BYTES, 0) != word:
                raise OSError(f"process {process} is another one than was meant: in another container, say")
            self._map = mmap.mmap(file.fileno(), 0)

    def tensor(self, begin: int, nbytes: int) -> torch.Tensor:
        """Returns some of the bytes as a 1-D tensor, not to be written to."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
