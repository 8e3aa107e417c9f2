"""`ScaledParts`: the factor by which this rank has scaled its part of a gradient before a step.

`torch.nn.utils.clip_grad_norm_` takes plain gradients to be whole. Of this rank's parts it computes the norm
of the parts alone, so each rank scales by another factor. One parameter that is cut between two ranks shows
it: users scale a parameter's gradient as a whole, by one number. Other edits change elements differently, and
say nothing here: noise, clipping by value, zeros.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import GroupPositions, accelerator_of
from fsdp_wrap._params import Buffers, Layout, ShardedParams
from fsdp_wrap._runtime import Unit

_ELEMENTS, _FEWEST = 8, 4  # of a part that are looked at, and that must be there to tell a factor
_COMPARED_RANKS = 64  # that decide which units are looked at first
_FIRST_TURNS, _GOES_ON = 8, 16  # backwards whose gradients are looked at, and after an edit; on accelerators
# every so many, since each look waits for the device
_TOLD = struct.Struct("<i2f")  # the number of the cut unit; factors of the parameters cut at its two ends

_SAME_FACTOR = "All ranks hold parts of a gradient, so all must scale it by the same factor"
_CURE = (
    "torch.nn.utils.clip_grad_norm_ computes the norm of this rank's part alone: clip by "
    "model.clip_grad_norm_(max_norm) of the wrapped model, or by fsdp_wrap.clip_grad_norm_(model, max_norm)"
)


@dataclass(frozen=True)
class _Part:
    """This rank's part of a parameter that it shares with a neighbour: elements of a sharded parameter."""

    index: int
    offset: int
    numel: int

    def read(self, sharded: ShardedParams) -> torch.Tensor | None:
        """Returns some elements of the part's gradient, if it has any."""
        grad = sharded.sources[self.index].grad
        if grad is None or grad.ndim != 1:
            return None
        return grad[self.offset : self.offset + self.numel : max(1, self.numel // _ELEMENTS)]


@dataclass(frozen=True)
class _CutUnit:
    """A unit's parameters that are cut between this rank and the one before, and the one after.

    It holds the unit alone: a unit lets go of its parameters with its module.
    """

    number: int
    unit: Unit
    segment: int
    parts: tuple[_Part | None, _Part | None]

    @property
    def sharded(self) -> ShardedParams:
        """The segment's parameters."""
        return self.buffers.params[self.segment]

    @property
    def buffers(self) -> Buffers:
        """The buffers of the unit."""
        return self.unit.buffers

    @property
    def groups(self) -> list[GroupPositions]:
        """The log of the ranks that share its parameters; none where nobody could compare."""
        positions = self.buffers.communicator.positions
        return [] if positions is None or positions.present < 2 else [positions]

    def name_after(self, rank: int) -> str:
        """Returns the name of the parameter that is cut between a rank and the next one."""
        index = _cut_at(self.sharded.layout, self.sharded.layout.shard_numel * (rank + 1))
        return "" if index is None else self.unit.name_of(self.sharded.layout.fqns[index])


def _cut_at(layout: Layout, position: int) -> int | None:
    """Returns the index of the parameter that is cut at an element of the gathered buffer, if any."""
    pairs = enumerate(layout.extents)
    return next((index for index, extent in pairs if extent.start < position < extent.stop), None)


def _cut_units(units: Iterable[Unit]) -> list[_CutUnit]:
    """Returns the units that tell of factors, those first in which most ranks share a parameter."""
    ranked: list[tuple[int, _CutUnit]] = []
    for unit in units:
        for segment, sharded in enumerate(unit.params):
            buffers = unit.buffers
            kinds = any(isinstance(source, DTensor) for source in sharded.sources)
            if buffers.communicator.size < 2 or not sharded.layout.sharded or sharded.extended or kinds:
                continue
            cuts = [
                sharded.layout.shard_numel * rank
                for rank in range(1, min(buffers.communicator.size, _COMPARED_RANKS))
            ]
            shared = sum(_cut_at(sharded.layout, cut) is not None for cut in cuts)
            if shared:
                rank, intervals = buffers.communicator.rank, sharded.intervals()
                ends = (_cut_at(sharded.layout, sharded.layout.shard_numel * end) for end in (rank, rank + 1))
                first, last = (
                    None
                    if index is None
                    else _Part(index, intervals[index].offset, intervals[index].data.numel())
                    for index in ends
                )
                ranked.append((shared, _CutUnit(len(ranked), unit, segment, (first, last))))
    ranked.reverse()
    return [cut for _, cut in sorted(ranked, key=lambda pair: -pair[0])]


@dataclass
class _Sample:
    """Gradients of a cut unit that are watched.

    Attributes:
        cut: The unit.
        watched: The sharded parameter whose gradient tells of edits: clipping edits all.
        place: Address and version of that gradient.
        elements: Of each part's gradient as they were; None without one, or where only edits are watched.
    """

    cut: _CutUnit
    watched: weakref.ref[nn.Parameter]
    place: tuple[int, int]
    elements: Sequence[Sequence[float] | torch.Tensor | None]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that tells of edits; None if there is none any more."""
        param = self.watched()
        return None if param is None else param.grad

    @property
    def edited(self) -> bool:
        """Whether the gradient of a living model was written to or replaced."""
        if not self.cut.unit.params:
            return False
        grad = self.grad
        return grad is None or (grad.data_ptr(), grad._version) != self.place


class ScaledParts:
    """Samples of a tree's gradients, from the end of a backward to the step."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._cuts = _cut_units(units)
        self._turn, self._until = 0, _FIRST_TURNS
        self._sample: _Sample | None = None
        accelerators = (accelerator_of(cut.buffers.communicator.device) for cut in self._cuts)
        self._waits = any(accelerator is not None for accelerator in accelerators)

    def forget(self) -> None:
        """Drops the sample: a backward adds to the gradients."""
        self._sample = None

    def take(self) -> None:
        """Takes a sample of complete gradients: of another unit each time, in the same order on all ranks.

        Reads elements in the first turns, and as long as gradients are edited.
        """
        turn, self._turn = self._turn, self._turn + 1
        if self._waits and turn >= _FIRST_TURNS and turn % _GOES_ON:
            return
        count = len(self._cuts)
        for number in range(turn, turn + count):
            cut = self._cuts[number % count]
            if not cut.unit.params:  # its module has gone since
                continue
            if not cut.groups:
                return
            for part in cut.parts:
                watched = None if part is None else cut.sharded.sources[part.index]
                if watched is not None and (grad := watched.grad) is not None:
                    elements = (
                        [self._elements_of(cut, piece) for piece in cut.parts] if turn < self._until else ()
                    )
                    place = grad.data_ptr(), grad._version
                    self._sample = _Sample(cut, weakref.ref(watched), place, elements)
                    return

    def _elements_of(self, cut: _CutUnit, part: _Part | None) -> Sequence[float] | torch.Tensor | None:
        read = None if part is None else part.read(cut.sharded)
        return read if read is None else read.clone() if self._waits else _floats_of(read)

    @property
    def edited(self) -> bool:
        """Whether gradients were written to or replaced since the sample."""
        return self._sample is not None and self._sample.edited

    def accept(self) -> None:
        """Accepts edits of which it is known that all ranks have scaled by the same factor."""
        sample = self._sample
        if sample is not None and (grad := sample.grad) is not None:
            sample.place = grad.data_ptr(), grad._version

    def tell(self) -> Factors | None:
        """Returns what this rank tells of its factors; None without a sample of elements. Ends the sample."""
        sample, self._sample = self._sample, None
        self._until = self._turn + _GOES_ON
        if sample is None or not sample.elements:
            return None
        factors, dtype = [], sample.cut.sharded.dtype
        for part, before in zip(sample.cut.parts, sample.elements):
            now = None if part is None or before is None else part.read(sample.cut.sharded)
            if now is None or before is None:
                factors.append(math.nan)
            else:
                numbers = _floats_of(before) if isinstance(before, torch.Tensor) else before
                dtype = now.dtype
                factors.append(factor_of(numbers, _floats_of(now), dtype))
        return Factors(sample.cut, _TOLD.pack(sample.cut.number, *factors), 2 * tolerance_of(dtype))


@dataclass(frozen=True)
class Factors:
    """What this rank has told of its factors.

    Attributes:
        cut: The unit of the sample.
        text: The factors.
        tolerance: By which part of it a factor may be another one on another rank.
    """

    cut: _CutUnit
    text: bytes
    tolerance: float

    @property
    def groups(self) -> list[GroupPositions]:
        """The ranks that share parameters."""
        return self.cut.groups

    def judge(self, texts: Mapping[int, bytes], members: Sequence[int]) -> str | None:
        """Returns the error if two neighbours have scaled the parameter that they share differently."""
        told = {rank: _TOLD.unpack(text) for rank, text in texts.items()}
        for rank in sorted(told):
            if rank + 1 not in told or {told[rank][0], told[rank + 1][0]} != {self.cut.number}:
                continue
            one, other = told[rank][2], told[rank + 1][1]
            if abs(one - other) > self.tolerance * max(one, other):  # False with NaN
                name = self.cut.name_after(rank)
                return (
                    "ranks have scaled parts of one gradient differently before an optimizer's step: the "
                    f"gradient of '{name}' by {one:.4g} on rank {members[rank]} and by {other:.4g} on rank "
                    f"{members[rank + 1]}. {_SAME_FACTOR}. {_CURE}"
                )
        return None


def _floats_of(elements: torch.Tensor) -> list[float]:
    """Returns elements as Python numbers."""
    numbers: list[float] = elements.tolist()
    return numbers


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns by which part factors of one number may differ: products are rounded."""
    return max(1e-3, 8 * torch.finfo(dtype).eps)


def factor_of(before: Sequence[float], after: Sequence[float], dtype: torch.dtype) -> float:
    """Returns the one factor by which numbers were scaled; NaN if there is none, or nothing to tell from."""
    least, tolerance = torch.finfo(dtype).tiny, tolerance_of(dtype)
    pairs = [
        (b, a) for b, a in zip(before, after) if math.isfinite(b) and math.isfinite(a) and abs(b) > least
    ]
    sizes = [abs(b) for b, _ in pairs]
    if len(pairs) < _FEWEST or max(sizes) < (1 + 4 * tolerance) * min(sizes):
        return math.nan  # numbers of one size are also scaled alike by a bound
    ratios = [a / b for b, a in pairs]
    same = 0 < max(ratios) <= (1 + tolerance) * min(ratios)
    return median(ratios) if same and min(abs(a) for _, a in pairs) > least else math.nan
