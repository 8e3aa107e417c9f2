"""Memory of one process that another one reads: tensors are copied there, and read by offset."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right
from typing import NamedTuple

import torch

from fsdp_wrap._core import round_up

_ALIGNMENT_BYTES = 64
_LEAST_BYTES = 1 << 24  # of an addition


class StagedTensor(NamedTuple):
    """A dense tensor in the memory: its offset in bytes, and how it lies there."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def tensor_in(self, memory: mmap.mmap, begin: int = 0) -> torch.Tensor:
        """Returns the tensor, with a storage of its own size, in a map that begins at an offset."""
        if not self.numel:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.numel, offset=self.offset - begin)
        return flat.as_strided(self.shape, self.stride)


class StagingMemory:
    """An anonymous file that grows, of which each addition is mapped by itself.

    After `restart` new tensors overwrite the old ones.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("fsdp_wrap.checkpoint", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self._maps: list[mmap.mmap] = []
        self._begins: list[int] = []
        self._addresses: list[int] = []
        self._used, self._end = 0, 0

    def restart(self) -> None:
        """Lets new tensors take the place of the old ones."""
        self._used = 0

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in the memory; elsewhere of what has no dense memory of its own."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        made = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")  # has no gaps
        place = StagedTensor(self._room(tensor.nbytes), tensor.dtype, tuple(tensor.shape), made.stride())
        number = bisect_right(self._begins, place.offset) - 1
        return place.tensor_in(self._maps[number], self._begins[number]).copy_(tensor)

    def place_of(self, tensor: torch.Tensor) -> StagedTensor | None:
        """Returns where a tensor lies, or None if that is elsewhere."""
        address = tensor.data_ptr()
        for begin, start, mapped in zip(self._begins, self._addresses, self._maps):
            if start <= address < start + len(mapped):
                offset = begin + address - start
                return StagedTensor(offset, tensor.dtype, tuple(tensor.shape), tensor.stride())
        return None

    def _room(self, nbytes: int) -> int:
        """Returns the offset of so many free bytes in one map."""
        for begin, mapped in zip(self._begins, self._maps):
            offset = max(self._used, begin)
            if offset + nbytes <= begin + len(mapped):
                self._used = round_up(offset + nbytes, _ALIGNMENT_BYTES)
                return offset
        begin = self._end
        self._end = round_up(begin + max(nbytes, _LEAST_BYTES, begin // 2), mmap.PAGESIZE)
        os.ftruncate(self.descriptor, self._end)
        mapped = mmap.mmap(self.descriptor, self._end - begin, offset=begin)
        self._maps.append(mapped)
        self._begins.append(begin)
        self._addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        self._used = round_up(begin + nbytes, _ALIGNMENT_BYTES)
        return begin
