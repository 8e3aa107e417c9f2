"""`Statistics`: a few numbers about tensors, which add up over pieces, ranks and micro-batches.

Checksums and sketches are sums over elements. A parameter's element counts by its place in the parameter,
whoever holds it, so that all ways to cut a parameter give the same. An element of an activation counts by its
bits alone in the checksum, and by its place in its row in the sketch: the order of rows does not matter.

A sketch is the product with random signs. The difference of two sketches tells the size of the difference of
the tensors (Johnson and Lindenstrauss), and their angle whether one is a multiple of the other.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from fsdp_wrap._core import format_dtype
from fsdp_wrap._params import to_local
from fsdp_wrap._values.finding import looked_at

WIDTH = 16
"""Numbers of a sketch."""

_BLOCK = 4096
_MIX, _STIR = -7046029254386353131, -4658895280553007687
"""Odd numbers with bits that look random."""
_MIX_32, _STIR_32 = -1640531527, -2048144777
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 22
"""Elements that are summed at once, in 8 bytes each."""


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Returns a number that looks random for each: the same on all versions and devices."""
    numbers = numbers * _MIX
    numbers = (numbers ^ (numbers >> 29)) * _STIR
    return numbers ^ (numbers >> 32)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Returns an odd weight for each place in a block."""
    return _mixed(torch.arange(1, _BLOCK + 1, device=device)) | 1


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns the signs of a block: places x `WIDTH`."""
    return _signs_of(torch.arange(_BLOCK, device=device), dtype)


def _signs_of(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    columns = torch.arange(WIDTH, device=numbers.device)
    bits = _mixed((numbers.unsqueeze(1) + 1) * WIDTH + columns) >> 40 & 1
    return (1 - 2 * bits).to(dtype)


@dataclass(eq=False)
class Statistics:
    """Sums over the elements of tensors.

    Attributes:
        dtype: Name of the tensors' dtype, "" before the first.
        numel: Number of elements.
        zeros: Number of zeros.
        nan: Number of NaN.
        inf: Number of infinite elements.
        tensors: Number of pieces.
        total: Sum of the finite elements.
        squares: Sum of their squares.
        largest: Largest absolute value of them.
        checksum: Sum of hashes, modulo 2^64.
        sketch: `WIDTH` sums with random signs, in float64.
    """

    dtype: str = ""
    numel: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    tensors: int = 0
    total: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    checksum: int = 0
    sketch: torch.Tensor = field(default_factory=lambda: torch.zeros(WIDTH, dtype=torch.float64))

    @property
    def norm(self) -> float:
        """The norm of the finite elements."""
        return math.sqrt(self.squares)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor, name: str = "", start: int = 0) -> None:
        """Adds a tensor.

        Args:
            tensor: On any device.
            name: Name of the parameter that it is a piece of; "" for an activation.
            start: Index of the piece's first element in the flattened parameter.
        """
        seen = _numbers_of(tensor)
        if seen is None:
            return
        self.dtype = format_dtype(seen.dtype)
        self.tensors += 1
        flat = seen.reshape(-1)
        values = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
        low, high = (extreme.item() for extreme in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())
            values = values.nan_to_num(0.0, 0.0, 0.0)
            low, high = (extreme.item() for extreme in torch.aminmax(values))
        self.numel += flat.numel()
        self.zeros += flat.numel() - int(torch.count_nonzero(flat))
        self.total += values.sum().item()
        self.squares += torch.dot(values, values).item()
        self.largest = max(self.largest, -low, high)
        seed = zlib.crc32(name.encode())
        if not name:
            self._wrap(_checksum_of_set(flat))
            row = seen.shape[1:].numel() if seen.dim() > 1 else 1
            values, start = values.view(-1, row).sum(0), 0
        else:
            self._wrap(int(_weighted_sums(bits_of(flat).long().unsqueeze(0), start, seed)))
        self.sketch = self.sketch + _sketch(values, start, seed)

    def _wrap(self, checksum: int) -> None:
        self.checksum = (self.checksum + checksum) % 2**64

    def merge(self, other: Statistics) -> None:
        """Adds the sums of another one."""
        self.dtype = self.dtype or other.dtype
        for name in ("numel", "zeros", "nan", "inf", "tensors", "total", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self._wrap(other.checksum)
        self.sketch = self.sketch + other.sketch

    def as_list(self) -> list[Any]:
        """Returns the numbers, for a file: in the order of the fields, which files rely on."""
        return [*vars(self).values()][:-2] + [f"{self.checksum:016x}", self.sketch.tolist()]

    @classmethod
    def of_list(cls, numbers: Sequence[Any]) -> Statistics:
        """Undoes `as_list`."""
        checksum, sketch = int(numbers[-2], 16), torch.tensor(numbers[-1], dtype=torch.float64)
        values: Sequence[Any] = [*numbers[:-2], checksum, sketch]
        return cls(*values)


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what a record can hold of a tensor: floating-point numbers, or integers as int64."""
    seen = looked_at(tensor)
    if seen is None and not tensor.is_floating_point() and not tensor.is_complex():
        local = to_local(tensor).detach()
        if local.layout is torch.strided and local.numel() and not local.is_meta:
            seen = local.long()
    return seen


class _Blocking(NamedTuple):
    """The blocks in which a piece lies: the rest of a first one, whole ones, and the beginning of a last.

    `parts` are the places of each of these, the number of blocks, and the places in a block; `weights` and
    `signs` are those of the blocks.
    """

    parts: Sequence[tuple[slice, int, slice]]
    weights: torch.Tensor
    signs: torch.Tensor


@lru_cache(maxsize=1 << 14)
def _blocking_of(numel: int, start: int, seed: int, device: torch.device) -> _Blocking:
    parts, numbers, place = [], list[int](), 0
    while place < numel:
        offset, left = (start + place) % _BLOCK, numel - place
        length = min(_BLOCK - offset, left) if offset or left < _BLOCK else left // _BLOCK * _BLOCK
        blocks, first = max(1, length // _BLOCK), (start + place) // _BLOCK
        parts.append((slice(place, place + length), blocks, slice(offset, offset + length // blocks)))
        numbers += range(first, first + blocks)
        place += length
    seeded = torch.tensor(numbers, device=device) + (seed << 20)
    return _Blocking(parts, _mixed(seeded) | 1, _signs_of(seeded, torch.float64))


def _checksum_of_set(values: torch.Tensor) -> int:
    """Returns a sum of hashes in 32 bits, which are faster than 64, of elements in any order."""
    bits = values.view(torch.int16).int() if values.element_size() == 2 else values.view(torch.int32)
    bits = bits * _MIX_32
    bits ^= bits >> 15
    bits *= _STIR_32
    return int((bits ^ (bits >> 16)).sum(dtype=torch.int64))


def _sketch(values: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    blocking = _blocking_of(values.numel(), start, seed, values.device)
    signs = _signs(values.device, values.dtype)
    sums = [values[places].view(blocks, -1) @ signs[in_block] for places, blocks, in_block in blocking.parts]
    return (torch.cat(sums).double() * blocking.signs).sum(0).cpu()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bits of elements as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTS[real.element_size()])


def _weighted_sums(bits: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """Returns the sum modulo 2^64 of each row with a weight for each place, of which `start` is the first."""
    blocking, weights = _blocking_of(bits.shape[1], start, seed, bits.device), _weights(bits.device)
    sums = [
        (bits[:, places].view(len(bits), blocks, -1) * weights[in_block]).sum(2)
        for places, blocks, in_block in blocking.parts
    ]
    return (torch.cat(sums, 1) * blocking.weights).sum(1)


def bit_sums(rows: torch.Tensor) -> torch.Tensor:
    """Returns two sums modulo 2^64 of the bits of each row: plain, and with a weight for each place."""
    bits, (number, numel) = bits_of(rows), rows.shape
    sums = torch.zeros(number, 2, dtype=torch.int64, device=rows.device)
    step = max(1, _AT_ONCE // number // _BLOCK) * _BLOCK
    for start in range(0, numel, step):
        part = bits[:, start : start + step].long()
        sums += torch.stack([part.sum(1), _weighted_sums(part, start, seed=0)], 1)
    return sums


def changed_place(numel: int, plain: int, weighted: int) -> int | None:
    """Returns the one place at which rows of these differences of `bit_sums` differ; None if at several."""
    device = torch.device("cpu")
    for start in range(0, numel, _AT_ONCE):  # a multiple of a block
        blocks = torch.arange(start, min(start + _AT_ONCE, numel), _BLOCK) // _BLOCK
        weights = (_mixed(blocks) | 1).unsqueeze(1) * _weights(device)
        places = (weights * plain == weighted).flatten().nonzero()
        if len(places) == 1 and plain:
            return start + int(places)
    return None


def block_sums(rows: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns sums over blocks of `numel` elements of each row: with random signs, and of absolute values."""
    number, length = rows.shape
    blocks = -(-length // numel)
    places = torch.arange(numel, device=rows.device) % _BLOCK
    signs = _signs(rows.device, torch.float64)[places, 0]
    sums = torch.empty(2, number, blocks, dtype=torch.float64, device=rows.device)
    step = max(1, _AT_ONCE // max(length, 1))
    for start in range(0, number, step):
        part = rows[start : start + step].double()
        part = torch.nn.functional.pad(part, (0, blocks * numel - length)).view(-1, blocks, numel)
        sums[0, start : start + step] = part @ signs
        sums[1, start : start + step] = part.abs().sum(2)
    return sums
