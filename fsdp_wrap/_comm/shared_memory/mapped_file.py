"""A file of memory that grows, and maps of it that follow: address space is taken as it is needed.

A map that grows in place would have to be reserved, and what is reserved counts like what is used where a
process may have only so much address space. So what is added is mapped by itself, wherever there is room, and
what lies in the file keeps its address. Who writes to the file lets nothing lie across the ends that it has
had, so everybody finds each piece in one map, whenever they looked how long the file is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right

from fsdp_wrap._core import format_bytes

_FIXED = 0x10  # MAP_FIXED: in the place of what is mapped there
_NO_RESERVE = 0x4000  # MAP_NORESERVE: else the kernel may count all of the map as used
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)


class Descriptor:
    """A file descriptor that is closed with its last user.

    Attributes:
        number: What the system calls take.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class MappedFile:
    """A file of memory as this process has mapped it.

    Args:
        file: The file.
        private: Whether what is written here is this process's own.

    Raises:
        OSError: If the host does not allow it.
    """

    def __init__(self, file: Descriptor, private: bool = False) -> None:
        self._file = file
        self._sharing = mmap.MAP_PRIVATE | _NO_RESERVE if private else mmap.MAP_SHARED
        self._maps: list[mmap.mmap] = []
        self._begins: list[int] = []  # in the file
        self._addresses: list[int] = []
        self._end = 0
        self.extend(os.fstat(file.number).st_size)

    def extend(self, end: int) -> None:
        """Maps what lies behind what is mapped.

        Args:
            end: Until where; the file may be shorter still.

        Raises:
            OSError: If the host does not allow it.
        """
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
        """Returns the map in which something lies, and where in it.

        Raises:
            RuntimeError: If the file has grown, and the host does not allow to map more of it.
        """
        if begin >= self._end:
            self._follow()
        index = bisect_right(self._begins, begin) - 1
        return self._maps[index], begin - self._begins[index]

    def address(self, begin: int) -> int:
        """Returns where in this process something lies.

        Raises:
            RuntimeError: As `at` does.
        """
        if begin >= self._end:
            self._follow()
        index = bisect_right(self._begins, begin) - 1
        return self._addresses[index] + begin - self._begins[index]

    def _follow(self) -> None:
        """Maps what the file has grown by."""
        end = os.fstat(self._file.number).st_size
        try:
            self.extend(end)
        except OSError as error:
            raise RuntimeError(
                f"this process cannot map {format_bytes(end - self._end)} more of the memory that the ranks "
                f"of this host share ({error}). Let it have more address space (ulimit -v), or set "
                "FSDP_WRAP_SHARED_MEMORY=0 on all ranks"
            ) from error

    def place(self, address: int) -> int | None:
        """Returns what in the file lies at an address of this process; None if nothing does."""
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
    """Maps some of a file in the place of another map, which unmaps it when it ends.

    Raises:
        OSError: If the host does not allow it.
    """
    both = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, nbytes, both, sharing | _FIXED, descriptor, begin) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
