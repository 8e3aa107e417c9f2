"""`SavedStorage`: memory of tensors that autograd saves, on the device or in host memory.

Memory of the device is allocated and freed on the stream of the computation, which has waited for the copies
by then. So no `record_stream` is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_wrap._comm import Accelerator, Pending, copy_to_device, copy_to_host
from fsdp_wrap._core import NO_SPAN, SpanKind
from fsdp_wrap._core.torch_private import storage_use_count
from fsdp_wrap._runtime import Unit

_TO_HOST, _TO_DEVICE = "activations to host", "activations to device"


class SavedStorage:
    """One storage of which autograd has saved tensors.

    Attributes:
        flat: All of it on the device, 1-D; None while it is in host memory.
        used: Whether a backward has asked for it: it does not leave any more.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.flat: torch.Tensor | None = flattened(tensor)
        self.nbytes = self.flat.nbytes
        self.used = False
        self._home: torch.Tensor | None = None
        self._arriving: Pending | None = None
        self._version: int | None = None  # when it left the device

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether anything but saved tensors keeps the storage in memory."""
        return self.flat is None or _holders(self.flat) > _ALONE

    def is_at(self, address: int) -> bool:
        """Whether it is the storage at an address on the device."""
        return self.flat is not None and self.flat.untyped_storage()._cdata == address

    @property
    def is_on_host(self) -> bool:
        """Whether the device does not have it."""
        return self.flat is None

    @property
    def version(self) -> int:
        """The version counter of the tensors, or that when they left the device."""
        if self._version is not None or self.flat is None:
            return self._version or 0
        return self.flat._version

    def to_host(self, accelerator: Accelerator) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (target, source) of the copy to host memory."""
        assert self.flat is not None
        self._home = accelerator.empty_on_host(self.flat.numel(), self.flat.dtype, True)
        return self._home, self.flat

    def leave(self) -> None:
        """Frees the memory of the device after the copy, unless a backward has asked for it."""
        if not self.used and self.flat is not None:
            self._version, self.flat = self.flat._version, None

    def to_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (target, source) of the copy back to the device."""
        home, self._home = self._home, None
        assert home is not None
        self.flat = torch.empty(home.shape, dtype=home.dtype, device=device)
        return self.flat, home

    def arrives_by(self, pending: Pending) -> None:
        """Notes the copy to the device, which the first use waits for."""
        self._arriving = pending

    def on_device(self) -> torch.Tensor:
        """Returns all of it on the device, 1-D, for what is computed next."""
        arriving, self._arriving, self.used = self._arriving, None, True
        if arriving is not None:
            arriving.wait()
        assert self.flat is not None
        return self.flat


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of a tensor's storage, 1-D, with the tensor's version counter and without its graph."""
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((numel,), (1,), 0)


def _holders(flat: torch.Tensor) -> int:
    return storage_use_count(flat.untyped_storage()._cdata)


_ALONE = _holders(flattened(torch.empty(1)))
"""The count of a storage that nothing but one `SavedStorage` holds."""


class CopiesToHost(NamedTuple):
    """Storages on their way to host memory.

    Attributes:
        turn: The turn in which their copies were issued.
        storages: Weak references, since graphs may go meanwhile.
        copying: Their copies.
    """

    turn: int
    storages: Sequence[weakref.ref[SavedStorage]]
    copying: Pending

    def end(self) -> None:
        """Lets the computation wait for the copies, and frees the memory of the device."""
        self.copying.wait()
        for storage in _alive(self.storages):
            storage.leave()


class Bundle:
    """Storages that a unit has saved between two others, which come back together.

    Args:
        unit: The unit.
        before: The bundle that was saved before this one.

    Attributes:
        nbytes: Bytes of the storages that have left.
    """

    def __init__(self, unit: Unit, before: Bundle | None = None) -> None:
        self._unit = weakref.ref(unit)  # which leads here
        self._before = None if before is None else weakref.ref(before)
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._here: list[weakref.ref[SavedStorage]] = []  # saved here first, and not copied yet
        self._began = False
        self.nbytes = 0

    @property
    def before(self) -> Bundle | None:
        """The bundle that was saved before this one, if any of it is left."""
        return None if self._before is None else self._before()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was saved."""
        return not self._storages

    @property
    def has_left(self) -> bool:
        """Whether there is nothing more to copy to host memory."""
        return not self._here

    def add(self, storage: SavedStorage, is_new: bool) -> None:
        """Adds a storage of which a tensor was saved; `is_new` if no tensor of it was saved before."""
        self._storages.append(weakref.ref(storage))
        if is_new:
            self._here.append(weakref.ref(storage))

    def send(self, accelerator: Accelerator, turn: int) -> Iterator[CopiesToHost]:
        """Copies to host memory the storages that only autograd still holds."""
        here = [storage for storage in _alive(self._here) if not storage.used]
        leaving = [storage for storage in here if not storage.is_held_elsewhere]
        self._here = [weakref.ref(storage) for storage in here if storage not in leaving]
        if leaving:
            self.nbytes += sum(storage.nbytes for storage in leaving)
            with self._copying(leaving):
                pairs = [storage.to_host(accelerator) for storage in leaving]
                copying = copy_to_host(accelerator, pairs, _TO_HOST)
            yield CopiesToHost(turn, [*map(weakref.ref, leaving)], copying)

    def bring(self, accelerator: Accelerator, device: torch.device, storage: SavedStorage) -> None:
        """Copies all to the device when a backward asks for a storage, and at first the bundle before."""
        if storage.is_on_host or not self._began:
            self._fetch(accelerator, device)
        if not self._began and self.before is not None:
            self.before._fetch(accelerator, device)
        self._began = True

    def _fetch(self, accelerator: Accelerator, device: torch.device) -> None:
        storages = [storage for storage in _alive(self._storages) if storage.is_on_host]
        if storages:
            with self._copying(storages):
                pairs = [storage.to_device(device) for storage in storages]
                pending = copy_to_device(accelerator, pairs, _TO_DEVICE)
            for storage in storages:
                storage.arrives_by(pending)

    def _copying(self, storages: Iterable[SavedStorage]) -> Any:
        unit, nbytes = self._unit(), sum(storage.nbytes for storage in storages)
        return NO_SPAN if unit is None else unit.plug_ins.span(SpanKind.COPY, None, (unit,), nbytes)


def _alive(references: Iterable[weakref.ref[SavedStorage]]) -> list[SavedStorage]:
    """Returns each storage that a graph still has, once."""
    storages = (reference() for reference in references)
    return [*dict.fromkeys(storage for storage in storages if storage is not None)]
