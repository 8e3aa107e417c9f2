"""The ledger of memory: which storages live, on which device, what for, and since when in the step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_wrap.tools.planning.plan import Place

SHARDS, GATHERED, GRADIENTS, REDUCE_BUFFERS, ACTIVATIONS = (
    "shards",
    "gathered",
    "gradients",
    "reduce buffers",
    "activations",
)
OPTIMIZER_STATE, OPTIMIZER_TEMPORARIES, COMMUNICATOR, OTHERS = (
    "optimizer state",
    "optimizer temporaries",
    "communicator",
    "others",
)

_ALIGNMENT = 512
"""Bytes at whose multiples storages begin, in the addresses that they are given."""


class Record:
    """One storage.

    Attributes:
        nbytes: What it takes now.
        device: Where it is said to be.
        kind: What it is for, as far as is known by now.
        pinned: Whether it is pinned memory of the host.
        address: Where it is said to begin.
        known: Whether its numbers are what they would be.
    """

    __slots__ = ("address", "device", "kind", "known", "nbytes", "pinned", "reference")

    def __init__(self, nbytes: int, device: torch.device, kind: str, address: int) -> None:
        self.nbytes, self.device, self.kind, self.address = nbytes, device, kind, address
        self.pinned = self.known = False
        self.reference: Any = None


@dataclass
class Peak:
    """The most that was held at any time."""

    nbytes: int
    by_kind: dict[str, int]
    place: Place


class Ledger:
    """Notes storages as they come, grow, shrink and go, and where in the step that is.

    Args:
        device_type: Where the model computes; memory of the host is counted apart if that is not the CPU.

    Attributes:
        places: Where it was and is, in the order of its visits.
        kind: What storages are for that come now.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.places = [Place("", "setup")]
        self.kind = OTHERS
        self._records: dict[int, Record] = {}
        self._next = _ALIGNMENT
        self._changes: list[tuple[Record, int, int, Place]] = []
        self._before: dict[Record, int] = {}

    def come_to(self, place: Place) -> None:
        """Notes that the program is at another place from now on."""
        if place != self.places[-1]:
            self.places.append(place)

    @property
    def visit(self) -> int:
        """The number of the place where the program is now."""
        return len(self.places) - 1

    def record_of(self, tensor: torch.Tensor) -> Record | None:
        """Returns the record of a tensor's storage; None if it is none of ours."""
        return self._records.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: torch.Tensor, device: torch.device) -> Record:
        """Notes a tensor's storage, unless it is known; one that is known may have another size now."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        record = self._records.get(key)
        if record is not None:
            if record.nbytes != nbytes:
                self._change(record, nbytes)
            return record
        record = self._records[key] = Record(0, device, self.kind, self._next)
        record.reference = weakref.ref(storage, lambda _: self._gone(key))
        self._next += (nbytes // _ALIGNMENT + 2) * _ALIGNMENT
        self._change(record, nbytes)
        return record

    def _gone(self, key: int) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._change(record, 0)

    def resized(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Notes that a storage's memory has come, for some kind of use, or gone."""
        record = self._records.get(storage._cdata)
        if record is not None:
            if storage.nbytes():
                record.kind = kind
            self._change(record, storage.nbytes())

    def _change(self, record: Record, nbytes: int) -> None:
        if nbytes != record.nbytes:
            self._changes.append((record, nbytes - record.nbytes, self.visit, self.places[-1]))
            record.nbytes = nbytes

    def assign(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Says what the storages of tensors are for."""
        for tensor in tensors:
            record = self.record_of(tensor)
            if record is not None:
                record.kind = kind

    @property
    def live(self) -> list[Record]:
        """The storages that are there now."""
        return list(self._records.values())

    def begin(self) -> None:
        """Begins to note changes anew."""
        self._changes = []
        self._before = {record: record.nbytes for record in self._records.values()}

    def history(self, on_host: bool = False) -> History:
        """Tells how memory came and went since `begin`, by kinds as they are known now.

        Args:
            on_host: Whether to tell of the host's memory beside the device, or of the device's.
        """
        before = {
            record: nbytes for record, nbytes in self._before.items() if self.on_host(record) == on_host
        }
        changes = [each for each in self._changes if self.on_host(each[0]) == on_host]
        return History(before, changes)

    def on_host(self, record: Record) -> bool:
        """Whether a storage lies in memory of the host beside the device."""
        return self._device_type != "cpu" and record.device.type == "cpu"


class History:
    """How memory came and went for a while.

    Attributes:
        peak: When most was held.
        spans: For each visit of a place: its number, the place, the most bytes held then, and these by kind.
        rest: What was held in the end, by kind.
    """

    def __init__(self, before: dict[Record, int], changes: list[tuple[Record, int, int, Place]]) -> None:
        held: dict[str, int] = {}
        for record, nbytes in before.items():
            held[record.kind] = held.get(record.kind, 0) + nbytes
        total = sum(held.values())
        self.peak = Peak(total, dict(held), Place("", "step"))
        self.spans: list[tuple[int, Place, int, dict[str, int]]] = []
        for record, delta, visit, place in changes:
            held[record.kind] = held.get(record.kind, 0) + delta
            total += delta
            if total > self.peak.nbytes:
                self.peak = Peak(total, dict(held), place)
            if not self.spans or self.spans[-1][0] != visit:
                self.spans.append((visit, place, total, dict(held)))
            elif total > self.spans[-1][2]:
                self.spans[-1] = visit, place, total, dict(held)
        self.rest = dict(held)
