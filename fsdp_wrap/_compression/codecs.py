"""Codecs: floating-point numbers in fewer bytes, with a known bound on the error.

Blocks of numbers share a scale, as in ZeRO++ (Wang et al., 2023). Rounding goes to the nearest, so the same
numbers always give the same bytes. It need not be random: master weights and optimizer state are never
rounded, and a gradient is rounded once, before it is summed, so that no error adds up over hops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from fsdp_wrap._core import ceil_div, round_up

BLOCK = 128
"""So many consecutive numbers share a scale."""

_CHUNK = 1 << 17
"""So many numbers are worked on at once: that bounds memory, and the next pass finds them in the cache."""

_ALIGNMENT_BYTES = 8  # of the widest number within an encoding

Decoded = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a view of the target, and the numbers that belong there."""


class Codec(ABC):
    """A way to write floating-point numbers in a 1-D tensor of bytes."""

    @abstractmethod
    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Returns the encoded bytes of so many numbers of a dtype: a multiple of 8."""

    @abstractmethod
    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes 1-D numbers into `nbytes` bytes."""

    @abstractmethod
    def decoded(self, encoded: torch.Tensor, target: torch.Tensor) -> Decoded:
        """Yields the numbers piece by piece, beside views of a 1-D tensor of the size and dtype encoded."""


class Narrow(Codec):
    """Every number in a narrower floating-point dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return round_up(numel * self._dtype.itemsize, _ALIGNMENT_BYTES)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        self._numbers(encoded, values.numel()).copy_(values)

    def decoded(self, encoded: torch.Tensor, target: torch.Tensor) -> Decoded:
        yield target, self._numbers(encoded, target.numel())

    def _numbers(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded[: numel * self._dtype.itemsize].view(self._dtype)


class _Blockwise(Codec):
    """Integers from -levels to levels, times one scale per block: its largest absolute value / levels.

    A number x comes back as q with |x - q| <= scale / 2, up to rounding in the dtype of the scale, which is
    that of the numbers, or float32 if that is wider. A block with a NaN or an infinity comes back without a
    finite number, so that whoever looks for one finds it.
    """

    _levels: int
    _block_nbytes: int

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        block_nbytes = self._block_nbytes + _scale_dtype(dtype).itemsize
        return round_up(ceil_div(numel, BLOCK) * block_nbytes, _ALIGNMENT_BYTES)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        for part, scales, codes in self._chunks(values, encoded):
            blocks = _in_blocks(part).to(scales.dtype)
            torch.div(blocks.abs().amax(1), self._levels, out=scales)
            scales.clamp_(min=torch.finfo(scales.dtype).tiny)  # zeros are divided by it
            self._write((blocks / scales[:, None]).round_(), codes)

    def decoded(self, encoded: torch.Tensor, target: torch.Tensor) -> Decoded:
        for part, scales, codes in self._chunks(target, encoded):
            yield part, (self._read(codes) * scales[:, None]).view(-1)[: part.numel()]

    def _chunks(
        self, numbers: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields parts of the numbers with their scales and, blocks x bytes, their codes."""
        dtype, count = _scale_dtype(numbers.dtype), ceil_div(numbers.numel(), BLOCK)
        scales = encoded[: count * dtype.itemsize].view(dtype)
        codes = encoded[scales.nbytes : scales.nbytes + count * self._block_nbytes].view(count, -1)
        cut = torch.split
        yield from zip(cut(numbers, _CHUNK), cut(scales, _CHUNK // BLOCK), cut(codes, _CHUNK // BLOCK))

    @abstractmethod
    def _write(self, whole: torch.Tensor, codes: torch.Tensor) -> None:
        """Writes blocks of whole numbers."""

    @abstractmethod
    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns the whole numbers."""


class _Int8(_Blockwise):
    _levels, _block_nbytes = 127, BLOCK

    def _write(self, whole: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.int8).copy_(whole)

    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8)


class _Int4(_Blockwise):
    """Two in a byte: the block's first half in the lower bits, its second half in the upper ones."""

    _levels, _block_nbytes = 7, BLOCK // 2

    def _write(self, whole: torch.Tensor, codes: torch.Tensor) -> None:
        lower, upper = whole.add_(8).to(torch.uint8).chunk(2, dim=1)
        torch.bitwise_or(lower, upper << 4, out=codes)

    def _read(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.cat([codes & 15, codes >> 4], dim=1).view(torch.int8) - 8


class ExactTail(Codec):
    """Another codec for all numbers but the last few, which stay exact."""

    def __init__(self, codec: Codec, tail: int) -> None:
        self._codec, self._tail = codec, tail

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return self._codec.nbytes(numel - self._tail, dtype) + round_up(
            self._tail * dtype.itemsize, _ALIGNMENT_BYTES
        )

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        head, tail = values.tensor_split([values.numel() - self._tail])
        of_head, of_tail = self._cut(encoded, values)
        self._codec.encode(head, of_head)
        of_tail.copy_(tail)

    def decoded(self, encoded: torch.Tensor, target: torch.Tensor) -> Decoded:
        head, tail = target.tensor_split([target.numel() - self._tail])
        of_head, of_tail = self._cut(encoded, target)
        yield from self._codec.decoded(of_head, head)
        yield tail, of_tail

    def _cut(self, encoded: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = self._codec.nbytes(numbers.numel() - self._tail, numbers.dtype)
        tail = encoded[at : at + self._tail * numbers.itemsize].view(numbers.dtype)
        return encoded[:at], tail


CODECS: dict[str, Codec] = {"bf16": Narrow(torch.bfloat16), "int8": _Int8(), "int4": _Int4()}


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return (F.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
