"""A file of memory that grows, and maps of it that follow: address space is taken as it is needed.

A map that grows in place would have to be reserved, and reserved address space counts like used one where a
process has a limit. So each addition is mapped by itself, wherever there is room, and addresses do not
change. The writer of the file lets no piece lie across a former end, so every process finds each piece in one
map, whenever it has looked at the length.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right

from fsdp_wrap._core import format_bytes

_FIXED = 0x10  # MAP_FIXED: replaces an existing map
_NO_RESERVE = 0x4000  # MAP_NORESERVE: else the kernel may count all of the map as used
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)


class Descriptor:
    """A file descriptor that is closed with its last user."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class MappedFile:
    """A file of memory as this process has mapped it; privately, its writes are its own."""

    def __init__(self, file: Descriptor, private: bool = False) -> None:
        self._file = file
        self._sharing = mmap.MAP_PRIVATE | _NO_RESERVE if private else mmap.MAP_SHARED
        self._maps: list[mmap.mmap] = []
        self._begins: list[int] = []  # in the file
        self._addresses: list[int] = []
        self._end = 0
        self._lock = threading.RLock()  # of growing: threads may communicate for several models at a time
        self.extend(os.fstat(file.number).st_size)

    def extend(self, end: int) -> None:
        """Maps the file up to `end`, also beyond its length; raises an OSError if the host refuses."""
        nbytes = end - self._end
        # Of no file at first: a map of a file that Python makes keeps a descriptor of its own.
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        _map_in_place(address, nbytes, self._sharing, self._file.number, self._end)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self._maps.append(mapped)
        self._begins.append(self._end)
        self._addresses.append(address)
        self._end = end

    def at(self, begin: int) -> tuple[mmap.mmap, int]:
        """Returns the map of an offset, and the offset there; raises a RuntimeError if mapping fails."""
        if begin >= self._end:
            self._follow()
        index = bisect_right(self._begins, begin) - 1
        return self._maps[index], begin - self._begins[index]

    def address(self, begin: int) -> int:
        """Returns the address of an offset in this process; raises as `at` does."""
        if begin >= self._end:
            self._follow()
        index = bisect_right(self._begins, begin) - 1
        return self._addresses[index] + begin - self._begins[index]

    def _follow(self) -> None:
        """Maps what the file has grown by, unless another thread has."""
        with self._lock:
            end = os.fstat(self._file.number).st_size
            try:
                if end > self._end:
                    self.extend(end)
            except OSError as error:
                raise RuntimeError(
                    f"this process cannot map {format_bytes(end - self._end)} more of the memory that the "
                    f"ranks of this host share ({error}). Let it have more address space (ulimit -v), or set "
                    "FSDP_WRAP_SHARED_MEMORY=0 on all ranks"
                ) from error

    def place(self, address: int) -> int | None:
        """Returns the offset in the file of an address of this process; None if it lies elsewhere."""
        for begin, first, mapped in zip(self._begins, self._addresses, self._maps):
            if 0 <= address - first < len(mapped):
                return begin + address - first
        return None


_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]


def _map_in_place(address: int, nbytes: int, sharing: int, descriptor: int, begin: int) -> None:
    """Maps a part of a file in the place of another map, which unmaps it when it ends; raises an OSError."""
    both = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, nbytes, both, sharing | _FIXED, descriptor, begin) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
