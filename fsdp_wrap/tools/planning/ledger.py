"""The ledger of memory: which storages live, on which device, for which kind of use, and since when."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_wrap.tools.planning.figures import ACTIVATIONS, FORWARD, OTHERS, STEP, Place

_ALIGNMENT = 512
"""Bytes between the addresses at which storages may begin."""


class StorageRecord:
    """One storage: its bytes now, where it is said to be, and its kind of use as far as is known.

    `known` says whether its values are those of a real run, `made` at which place it was made.
    """

    __slots__ = ("address", "device", "kind", "known", "made", "nbytes", "pinned", "reference")

    def __init__(self, nbytes: int, device: torch.device, kind: str, address: int, made: Place) -> None:
        self.nbytes, self.device, self.kind, self.address, self.made = nbytes, device, kind, address, made
        self.pinned = self.known = False
        self.reference: Any = None


_Change = tuple[StorageRecord, int, int, Place, str]
"""A storage, by how many bytes it grew, the visit of a place, the place, and the operator that ran."""


@dataclass
class Peak:
    """The most bytes that were held at any time, where, and the operator that took the last of them."""

    nbytes: int
    by_kind: dict[str, int]
    place: Place
    operator: str = ""


class Ledger:
    """Notes storages as they come, grow, shrink and go, and the place in the step of each change.

    On an accelerator memory of the host is counted apart. `places` are the visited places in order; new
    storages get the current `kind`. `operator` is the one that runs, on behalf of `caller`.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.places = [Place("", "setup")]
        self.kind, self.operator, self.caller = OTHERS, "", ""
        self._records: dict[int, StorageRecord] = {}
        self._next = _ALIGNMENT
        self._changes: list[_Change] = []
        self._before: dict[StorageRecord, int] = {}

    def come_to(self, place: Place) -> None:
        """Notes the place where the program is from now on."""
        if place != self.places[-1]:
            self.places.append(place)

    @property
    def visit(self) -> int:
        """The index of the current place."""
        return len(self.places) - 1

    def record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Returns the record of a tensor's storage; None if there is none."""
        return self._records.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor, device: torch.device) -> StorageRecord:
        """Notes a tensor's storage, or the new size of one that is known."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = StorageRecord(0, device, self.kind, self._next, self.places[-1])
            record.reference = weakref.ref(storage, lambda _: self._gone(key))
            self._next += (nbytes // _ALIGNMENT + 2) * _ALIGNMENT
        self._change(record, nbytes)
        return record

    def _gone(self, key: int) -> None:
        if (record := self._records.pop(key, None)) is not None:
            self._change(record, 0)

    def resized(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Notes that a storage's memory was allocated, for a kind of use, or freed."""
        if (record := self._records.get(storage._cdata)) is not None:
            if storage.nbytes():
                record.kind = kind
            self._change(record, storage.nbytes())

    def _change(self, record: StorageRecord, nbytes: int) -> None:
        if nbytes != record.nbytes:
            delta = nbytes - record.nbytes
            by = self.operator or self.caller
            if self.operator and self.caller:
                by = f"{self.operator} ({self.caller})"
            self._changes.append((record, delta, self.visit, self.places[-1], by))
            record.nbytes = nbytes

    def assign(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Sets the kind of use of the tensors' storages."""
        for tensor in tensors:
            if (record := self.record_of(tensor)) is not None:
                record.kind = kind

    @property
    def live(self) -> list[StorageRecord]:
        """The storages that are there now."""
        return list(self._records.values())

    def activations(self) -> Counter[str]:
        """Returns the bytes of activations on the device, by the unit whose forward made them."""
        by_unit = Counter[str]()
        for record in self._records.values():
            if record.kind == ACTIVATIONS and record.made.phase == FORWARD and not self.on_host(record):
                by_unit[record.made.unit] += record.nbytes
        return by_unit

    def begin(self) -> None:
        """Forgets earlier changes."""
        self._changes = []
        self._before = {record: record.nbytes for record in self._records.values()}

    def history(self, on_host: bool = False) -> History:
        """Returns the changes since `begin`, on the device or on the host, with storages' present kinds."""
        before = {
            record: nbytes for record, nbytes in self._before.items() if self.on_host(record) == on_host
        }
        return History(before, [change for change in self._changes if self.on_host(change[0]) == on_host])

    def on_host(self, record: StorageRecord) -> bool:
        """Whether a storage lies in memory of the host beside the device."""
        return self._device_type != "cpu" and record.device.type == "cpu"


class History:
    """How memory came and went for a while.

    `spans` has for each visit of a place its index, the place, and the most bytes held then, in all and by
    kind; `rest` has the bytes at the end, by kind.
    """

    def __init__(self, before: dict[StorageRecord, int], changes: list[_Change]) -> None:
        held: dict[str, int] = {}
        for record, nbytes in before.items():
            held[record.kind] = held.get(record.kind, 0) + nbytes
        total = sum(held.values())
        self.peak = Peak(total, dict(held), Place("", STEP))
        self.spans: list[tuple[int, Place, int, dict[str, int]]] = []
        for record, delta, visit, place, operator in changes:
            held[record.kind] = held.get(record.kind, 0) + delta
            total += delta
            if total > self.peak.nbytes:
                self.peak = Peak(total, dict(held), place, operator)
            if not self.spans or self.spans[-1][0] != visit:
                self.spans.append((visit, place, total, dict(held)))
            elif total > self.spans[-1][2]:
                self.spans[-1] = visit, place, total, dict(held)
        self.rest = held
