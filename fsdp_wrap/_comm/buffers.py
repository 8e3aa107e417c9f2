"""Buffers that travel: 1-D tensors whose memory comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch

from fsdp_wrap._comm.group_memory import GroupMemory

resize_watchers: list[Callable[[torch.UntypedStorage], None]] = []
"""Called when memory of a buffer has come or gone."""


def tell_resized(storage: torch.UntypedStorage) -> None:
    """Tells the watchers that memory has come or gone."""
    for watcher in tuple(resize_watchers):
        watcher(storage)


class Buffer:
    """A 1-D tensor whose memory comes and goes while views of it stay valid objects.

    It starts allocated: views can be made only while it is. They must not be used while it is freed.

    Attributes:
        data: The tensor.
        storages: Keys of the storages that it consists of.
    """

    temporary = True  # whether the content matters only while it is allocated
    _left = False  # see `leave`

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._lie_in(torch.empty(numel, dtype=dtype, device=device))

    def _lie_in(self, tensor: torch.Tensor) -> None:
        self.data = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self._storage = tensor.untyped_storage()
        self.storages: Collection[int] = (self._storage._cdata,)

    @property
    def allocated(self) -> bool:
        """Whether the memory is there."""
        return self.nbytes == 0 or self._storage.nbytes() > 0

    @property
    def resizable(self) -> bool:
        """Whether the memory can come and go: not once it is shared with NumPy, or left to a collective."""
        return not self._left and self._storage.resizable()

    def allocate(self) -> None:
        """Gets memory, with undefined content."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
            if resize_watchers:
                tell_resized(self._storage)

    def free(self) -> bool:
        """Gives the memory back; returns False where it cannot go, as `resizable` tells."""
        if self._storage.nbytes():
            if self._left or not self._storage.resizable():
                return False
            self._storage.resize_(0)
            if resize_watchers:
                tell_resized(self._storage)
        return True

    def leave(self) -> None:
        """Leaves the memory to a collective that has failed here: it may go on, so the memory cannot go.

        The owner drops the buffer. The collective holds the memory until it has ended.
        """
        self._left = True

    @contextmanager
    def having_memory(self) -> Iterator[None]:
        """Lets views be made, which needs memory for a moment where there is none."""
        there = self.allocated
        self.allocate()
        try:
            yield
        finally:
            if not there:
                self.free()

    def keep_alone(self) -> None:
        """Moves the content to memory of its own if other ranks can see it."""
        return None


class ResidentBuffer(Buffer):
    """A buffer over memory that stays: a shard that is the whole parameter (NO_SHARD)."""

    temporary = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._lie_in(tensor.data)

    @property
    def resizable(self) -> bool:
        return True

    def free(self) -> bool:
        return True


class PooledBuffer(Buffer):
    """A buffer in a group's memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, memory: GroupMemory) -> None:
        with memory.allocating():
            super().__init__(numel, dtype, device)
        self._memory = memory

    def allocate(self) -> None:
        if self._storage.nbytes() != self.nbytes:
            with self._memory.allocating():
                super().allocate()
