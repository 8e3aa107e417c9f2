"""Optimizer state in few bits: codes with one scale for each block of them, taken apart and made again.

In a state dict there are the values, in float32 and elementwise, under the name that state of more bits has,
and beside them the scales. So state fits any cut of the parameters, and other optimizers too. A value divided
by the scale of its block is closer to its own code than to any other: where blocks lie as they did, the same
codes come back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, final

import torch

from fsdp_wrap._core import ceil_div
from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._state.originals import Original

State = dict[str, Any]

SCALE = ".scale"
"""What the name of a state ends with that has the scales of another one."""

_BITSANDBYTES_BLOCK = 256


def is_scale(key: str, entry: Container[str]) -> bool:
    """Whether a state is the scales of another one in the same entry."""
    return key.endswith(SCALE) and key.removesuffix(SCALE) in entry


def block_of(numel: int, blocks: int) -> int | None:
    """Returns the power of two that makes so many blocks of so many elements, if one does."""
    block = 1 << max(0, ceil_div(numel, max(blocks, 1)) - 1).bit_length()
    return block if ceil_div(numel, block) == blocks else None


def small_states_of(optim: Any) -> SmallStates | None:
    """Returns how an optimizer keeps state in few bits; None if it does not, or in a way not known here."""
    while isinstance(getattr(optim, "optimizer", None), torch.optim.Optimizer):  # as clients wrap them
        optim = optim.optimizer
    packages = {kind.__module__.partition(".")[0] for kind in type(optim).__mro__}
    block = getattr(optim, "block_size", None)
    if "torchao" in packages and isinstance(block, int) and block & (block - 1) == 0:
        return _Torchao(block)
    bits = getattr(getattr(optim, "args", None), "optim_bits", None)
    return _Bitsandbytes(_BITSANDBYTES_BLOCK) if "bitsandbytes" in packages and bits == 8 else None


class SmallStates(ABC):
    """How optimizers keep state in few bits.

    Args:
        block: How many elements have one scale: a power of two.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def taken_apart(self, entry: Mapping[str, Any], shape: torch.Size) -> State:
        """Returns the state of one sharded parameter with values and scales in place of codes.

        Args:
            entry: As the optimizer has it.
            shape: Of the sharded parameter.

        Returns:
            Whatever is elementwise in float32; beside it, with the ending `SCALE`, the scale of each whole or
            last block: 1-D, and 0 where there are no codes.
        """
        found: State = {}
        entry = self.as_in_optimizer(entry)
        for key, value in entry.items():
            if key in self._parts:
                continue
            codes = self._codes_of(key, value, entry)
            elementwise = isinstance(value, torch.Tensor) and value.shape == shape and len(shape) > 0
            if codes is None and (not elementwise or is_scale(key, entry)):
                found[key] = value
                continue
            found[key] = value.float() if codes is None else codes.values().view(shape)
            scale = torch.zeros(ceil_div(shape.numel(), self.block), device=value.device)
            found[key + SCALE] = scale if codes is None else scale.copy_(codes.scale)
        return found

    def is_native(self, entry: Mapping[str, Any]) -> bool:
        """Whether the state of a parameter is as the optimizer has it, with codes."""
        flat = self.as_in_optimizer(entry)
        return flat is not entry or any(self._codes_of(*each, entry) is not None for each in entry.items())

    def put_together(self, entry: State, like: Mapping[str, Any]) -> State:
        """Returns the state of a sharded parameter as the optimizer keeps it.

        Args:
            entry: Values of the shape of the sharded parameter, and scales for each of its elements, NaN
                where these are of no parameter. A block of which all have the same one gets that; any other
                the one of its largest value.
            like: What the optimizer would begin with.
        """
        found: State = {}
        for key, value in entry.items():
            if is_scale(key, entry):
                continue
            begun = like.get(key)
            codes = None if begun is None else self._codes_of(key, begun, like)
            if codes is not None:
                scale = entry.get(key + SCALE)
                codes.take(value.reshape(-1).float(), None if scale is None else scale.reshape(-1))
                found |= self._of_key(key, like)
            elif isinstance(value, torch.Tensor) and isinstance(begun, torch.Tensor) and begun.dim():
                found[key] = value.to(begun.dtype)
            else:
                found[key] = value
        return self._as_loaded(found)

    def scales_of(self, original: Original, scale: torch.Tensor) -> IntervalTensor | None:
        """Returns, of the scales of a sharded parameter's blocks, those of an original parameter's.

        None where ranks have a part of the parameter between them: its blocks are others than the whole's.
        """
        interval = original.interval
        if interval.part is not None:
            return None
        return self.scales_within(
            original.shape.numel(), interval.start, interval.stop, interval.offset, scale
        )

    def scales_within(
        self, numel: int, start: int, stop: int, offset: int, scale: torch.Tensor
    ) -> IntervalTensor:
        """Returns the scales of a parameter's blocks, of which this rank holds an interval.

        A block belongs to the rank that has its first element. Its scale is 0 if that rank does not have all
        of it, or it is no block of the sharded parameter.

        Args:
            numel: Elements of the parameter.
            start: Of the interval.
            stop: Of the interval.
            offset: Where it begins in the sharded parameter.
            scale: Of the sharded parameter's blocks.
        """
        first, last = (ceil_div(end, self.block) for end in (start, stop))
        piece, ahead = scale.new_zeros(last - first), offset - start
        if ahead % self.block == 0 and last > first:
            begin = first + ahead // self.block
            piece.copy_(scale[begin : begin + last - first])
            if stop < numel and stop % self.block:
                piece[-1].zero_()
        return IntervalTensor(torch.Size([ceil_div(numel, self.block)]), first, piece)

    def spread(self, numel: int, start: int, piece: IntervalTensor, out: torch.Tensor) -> None:
        """Writes scales to every element of which this rank holds them, if they are of blocks of this size.

        Args:
            numel: Elements of the parameter.
            start: Of the interval that this rank holds of it.
            piece: Scales of its blocks, as `scales_within` has them.
            out: 1-D, for the interval.
        """
        out.zero_()
        if piece.shape[0] != ceil_div(numel, self.block):
            return
        begin = piece.start * self.block - start
        values = piece.piece.repeat_interleave(self.block)[: out.numel() - begin]
        out[begin : begin + values.numel()].copy_(values)

    _parts: Sequence[str] = ()  # names of what is no state of its own

    def as_in_optimizer(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns an entry of a state dict as it is in the optimizer."""
        return entry

    def _as_loaded(self, entry: State) -> State:
        """Undoes that, for what the optimizer is to load."""
        return entry

    @abstractmethod
    def _codes_of(self, key: str, value: Any, entry: Mapping[str, Any]) -> _Codes | None:
        """Returns the codes of a state; None where it is no such state."""

    def _of_key(self, key: str, entry: Mapping[str, Any]) -> State:
        """Returns what an optimizer keeps of one state."""
        return {key: entry[key]}


class _Codes:
    """The memory of one state in few bits.

    Args:
        codes: Its memory: one code for each element, or two in a byte.
        scale: Of each block.
        table: The numbers that codes stand for, ascending; None where the codes' dtype says it.
        block: Elements of a block; the last may have less.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor | None, block: int
    ) -> None:
        self._codes, self.scale, self._table, self._block = codes.view(-1), scale, table, block
        self._packed = table is not None and table.numel() <= 16

    def values(self) -> torch.Tensor:
        """Returns the values: 1-D, float32."""
        codes = self._codes
        if self._packed:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
        numbers = codes.float() if self._table is None else self._table[codes.int()]
        return numbers * self._by_element(self.scale, numbers.numel())

    def take(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Takes other values.

        Args:
            values: 1-D, float32.
            scales: Of each element; 0 where it is not known, NaN where there is nothing; or None.
        """
        self.scale.copy_(self._scale_of(values, scales))
        numbers = values / self._by_element(self.scale, values.numel()).clamp_min(torch.finfo().tiny)
        if self._table is None:
            self._codes.copy_(numbers)
            return
        between = (self._table[1:] + self._table[:-1]) / 2
        codes = torch.bucketize(numbers, between, right=True).to(torch.uint8)
        self._codes.copy_((codes[::2] << 4) | codes[1::2] if self._packed else codes)

    def _scale_of(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        most = torch.finfo(self._codes.dtype).max if self._table is None else 1.0
        own = self._by_block(values.abs()).amax(1).clamp_min(1e-12) / most
        if scales is None:
            return own
        blocks = self._by_block(scales, math.nan)
        most_known, least_known = (
            each(dim=1) for each in (blocks.nan_to_num(-torch.inf).amax, blocks.nan_to_num(torch.inf).amin)
        )
        return torch.where((most_known == least_known) & (most_known > 0), most_known, own)

    def _by_block(self, values: torch.Tensor, beyond: float = 0) -> torch.Tensor:
        lacking = -values.numel() % self._block
        return torch.nn.functional.pad(values, (0, lacking), value=beyond).view(-1, self._block)

    def _by_element(self, scale: torch.Tensor, numel: int) -> torch.Tensor:
        return scale.repeat_interleave(self._block)[:numel]


@final
class _Torchao(SmallStates):
    """torchao's: a tensor subclass with codes, scales and, below fp8, a table."""

    def _codes_of(self, key: str, value: Any, entry: Mapping[str, Any]) -> _Codes | None:
        if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor or not hasattr(value, "codes"):
            return None
        return _Codes(value.codes, value.scale, getattr(value, "qmap", None), value.block_size)  # type: ignore[attr-defined]


@final
class _Bitsandbytes(SmallStates):
    """bitsandbytes': codes "state1", with scales "absmax1" and the table "qmap1"; and so for "state2".

    In its state dicts they lie in a dict of their own, so that wrappers do not take them for elementwise.
    """

    _parts = ("absmax1", "absmax2", "qmap1", "qmap2")
    _APART = "__bnb_optimizer_quant_state__"

    def as_in_optimizer(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._APART not in entry:
            return entry
        others = {key: value for key, value in entry.items() if key != self._APART}
        return {**others, **entry[self._APART]}

    def _as_loaded(self, entry: State) -> State:
        # What is apart keeps its dtype.
        apart = {key: value for key, value in entry.items() if key.startswith(("state", "absmax", "qmap"))}
        return {**{key: value for key, value in entry.items() if key not in apart}, self._APART: apart}

    def _codes_of(self, key: str, value: Any, entry: Mapping[str, Any]) -> _Codes | None:
        if f"absmax{key[-1]}" not in entry or not key.startswith("state"):
            return None
        return _Codes(value, entry[f"absmax{key[-1]}"], entry[f"qmap{key[-1]}"], self.block)

    def _of_key(self, key: str, entry: Mapping[str, Any]) -> State:
        return {name: entry[name] for name in (key, f"absmax{key[-1]}", f"qmap{key[-1]}")}
