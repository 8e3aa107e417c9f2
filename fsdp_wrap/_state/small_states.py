"""State of low-bit optimizers: codes with one scale for each block, dequantised and quantised again.

State dicts have the values, elementwise in float32, under the name that state of more bits has, and the
scales beside them. So state fits any cut of the parameters, and other optimizers too. A value divided by the
scale of its block is closer to its own code than to any other: where blocks lie as they did, the same codes
come back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_wrap._core import ceil_div
from fsdp_wrap._params import IntervalTensor, to_local
from fsdp_wrap._state.optim_initial import innermost
from fsdp_wrap._state.originals import Original

State = dict[str, Any]

SCALE = ".scale"
"""Suffix of the name of a state that holds the scales of another one."""

_BITSANDBYTES_BLOCK = 256


def is_scale(key: str, entry: Container[str]) -> bool:
    """Whether a state is the scales of another one in the same entry."""
    return key.endswith(SCALE) and key.removesuffix(SCALE) in entry


def block_of(numel: int, blocks: int) -> int | None:
    """Returns the power of two that makes so many blocks of so many elements, if one does."""
    block = 1 << max(0, ceil_div(numel, max(blocks, 1)) - 1).bit_length()
    return block if ceil_div(numel, block) == blocks else None


def bounds_in(original: Original, shape: torch.Size, of_blocks: bool) -> tuple[int, int] | None:
    """Returns this rank's interval of some flattened state of a parameter; None if it is cut otherwise.

    With `of_blocks` the state has one element per block, on the rank that holds the first of its elements.
    """
    if not of_blocks:
        return original.bounds_in(shape)
    block, bounds = block_of(original.shape.numel(), shape[0]), _bounds(original)
    if block is None or bounds is None:
        return None
    return ceil_div(bounds[0], block), ceil_div(bounds[1], block)


def small_states_of(optim: Any) -> SmallStates | None:
    """Returns how a low-bit optimizer keeps its state; None for other optimizers and unknown ones."""
    optim = innermost(optim)
    packages = {kind.__module__.partition(".")[0] for kind in type(optim).__mro__}
    block = getattr(optim, "block_size", None)
    if "torchao" in packages and isinstance(block, int) and block & (block - 1) == 0:
        return _Torchao(block)
    bits = getattr(getattr(optim, "args", None), "optim_bits", None)
    return _Bitsandbytes(_BITSANDBYTES_BLOCK) if "bitsandbytes" in packages and bits == 8 else None


class SmallStates(ABC):
    """The format of a low-bit optimizer's state, of blocks of `block` elements: a power of two."""

    def __init__(self, block: int) -> None:
        self.block = block

    def taken_apart(self, entry: Mapping[str, Any], shape: torch.Size) -> State:
        """Dequantises the state of one sharded parameter of this shape.

        Elementwise state is in float32; beside it, with the suffix `SCALE`, is the scale of each whole or
        last block: 1-D, and 0 where there are no codes.
        """
        apart: State = {}
        entry = {key: to_local(value) for key, value in self.as_in_optimizer(entry).items()}
        for key, value in entry.items():
            if key in self._parts:
                continue
            codes = self._codes_of(key, value, entry)
            elementwise = isinstance(value, torch.Tensor) and value.shape == shape and len(shape) > 0
            if codes is None and (not elementwise or is_scale(key, entry)):
                apart[key] = value
                continue
            apart[key] = value.float() if codes is None else codes.values().view(shape)
            scale = torch.zeros(ceil_div(shape.numel(), self.block), device=value.device)
            apart[key + SCALE] = scale if codes is None else scale.copy_(codes.scale)
        return apart

    def is_native(self, entry: Mapping[str, Any]) -> bool:
        """Whether a parameter's state has codes, as the optimizer keeps it."""
        flat = self.as_in_optimizer(entry)
        return flat is not entry or any(self._codes_of(*item, entry) is not None for item in entry.items())

    def put_together(self, entry: State, like: Mapping[str, Any]) -> State:
        """Quantises the state of a sharded parameter, into the memory of its initial state `like`.

        The entry has scales for each element, NaN where it belongs to no parameter. A block whose elements
        have the same scale gets that; any other the scale of its largest value.
        """
        quantised: State = {}
        for key, value in entry.items():
            if is_scale(key, entry):
                continue
            begun = like.get(key)
            codes = None if begun is None else self._codes_of(key, begun, like)
            if codes is not None:
                scale = entry.get(key + SCALE)
                codes.take(value.reshape(-1).float(), None if scale is None else scale.reshape(-1))
                quantised |= self._of_key(key, like)
            elif isinstance(value, torch.Tensor) and isinstance(begun, torch.Tensor) and begun.dim():
                quantised[key] = value.to(begun.dtype)
            else:
                quantised[key] = value
        return self._as_loaded(quantised)

    def scales_of(self, original: Original, scale: torch.Tensor) -> IntervalTensor | None:
        """Returns this rank's interval of an original parameter's scales, out of its sharded parameter's.

        A block belongs to the rank that has its first element. Its scale is 0 if that rank does not have all
        of it, or it is no block of the sharded parameter. None where the rank holds several intervals, or
        tensor parallelism has cut the parameter: its blocks are others than the whole's.
        """
        bounds, numel, offset = _bounds(original), original.shape.numel(), original.interval.offset
        if bounds is None or original.interval.part is not None:
            return None
        start, stop = bounds
        first, last = (ceil_div(end, self.block) for end in (start, stop))
        piece, ahead = scale.new_zeros(last - first), offset - start
        if ahead % self.block == 0 and last > first:
            begin = first + ahead // self.block
            piece.copy_(scale[begin : begin + last - first])
            if stop < numel and stop % self.block:
                piece[-1].zero_()
        return IntervalTensor(torch.Size([ceil_div(numel, self.block)]), first, piece)

    def spread(self, original: Original, piece: IntervalTensor, to: torch.Tensor) -> None:
        """Writes the scales of `scales_of` to each element of a tensor like the sharded parameter.

        Zeros where they are of blocks of another size.
        """
        bounds, whole = _bounds(original), isinstance(original.source, DTensor)
        out = to.view(-1) if whole else original.interval.within(to)
        out.zero_()
        if bounds is None or piece.shape[0] != ceil_div(original.shape.numel(), self.block):
            return
        begin = piece.start * self.block - bounds[0]
        values = piece.piece.repeat_interleave(self.block)[: out.numel() - begin]
        out[begin : begin + values.numel()].copy_(values)

    _parts: Sequence[str] = ()  # names of what is no state of its own

    def as_in_optimizer(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns an entry of a state dict as it is in the optimizer."""
        return entry

    def _as_loaded(self, entry: State) -> State:
        """Undoes `as_in_optimizer`, for an entry that the optimizer loads."""
        return entry

    @abstractmethod
    def _codes_of(self, key: str, value: Any, entry: Mapping[str, Any]) -> _Codes | None:
        """Returns the codes of a state; None for a state without codes."""

    def _of_key(self, key: str, entry: Mapping[str, Any]) -> State:
        """Returns what an optimizer keeps of one state."""
        return {key: entry[key]}


class _Codes:
    """One quantised state, in the optimizer's memory.

    Args:
        codes: One code for each element, or two in a byte.
        scale: The scale of each block.
        table: The ascending numbers that codes stand for; None where codes are floats.
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
        """Quantises values (1-D, float32) into the memory; scales of elements are 0 where unknown."""
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
            extreme(dim=1)
            for extreme in (blocks.nan_to_num(-torch.inf).amax, blocks.nan_to_num(torch.inf).amin)
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


# where a rank's interval lies


def _bounds(original: Original) -> tuple[int, int] | None:
    """Returns this rank's interval of a flattened parameter; None where it holds several."""
    param = original.source
    if not isinstance(param, DTensor):
        return original.interval.start, original.interval.stop
    cuts = [dim for dim, placement in enumerate(param.placements) if not isinstance(placement, Replicate)]
    placements = [param.placements[dim] for dim in cuts]
    if len(cuts) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in placements):
        return None
    first, rows = 0, param.shape[0] if param.ndim else 1
    for dim in cuts:
        chunk = ceil_div(rows, param.device_mesh.size(dim))
        first = min(param.device_mesh.get_local_rank(dim) * chunk, rows)
    row = param.shape[1:].numel()
    return first * row, first * row + to_local(param).numel()
