"""Which bytes of which memory a tensor lies in, and who has touched them.

A block is one stay of some memory: from its allocation until it goes back to the allocator. A storage that is
resized to nothing and back has had two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from bed.accelerator.streams import HOST, Clock

Interval = tuple[int, int]
"""Bytes [start, stop) of a block."""

_GRANULE = 512
"""Bytes of which the allocator hands out multiples."""

_MOST_ROWS = 512
"""A tensor in more pieces counts as all that lies between the first and the last."""


@dataclass(eq=False)
class Block:
    """Some memory while it is allocated."""

    number: int
    nbytes: int
    queue: str
    """The stream whose allocations may follow at once when it is freed, or the host."""
    pinned: bool = False
    """Whether the device copies from and to it by itself, if it is the host's."""
    initial: torch.Tensor | None = None
    """Its content when it was first seen, as bytes; None if nothing had been written to it."""
    freed: Action | None = None
    accesses: list[Access] = field(default_factory=list)
    """Those with which later ones may conflict."""

    @property
    def held(self) -> int:
        """Bytes that it takes from the allocator."""
        return -(-self.nbytes // _GRANULE) * _GRANULE

    @property
    def on_host(self) -> bool:
        return self.queue == HOST


@dataclass(eq=False)
class Region:
    """Some bytes of a block."""

    block: Block
    intervals: Sequence[Interval]

    def overlaps(self, intervals: Sequence[Interval]) -> bool:
        mine = self.intervals
        if not mine or not intervals or mine[-1][1] <= intervals[0][0] or intervals[-1][1] <= mine[0][0]:
            return False
        return any(a < d and c < b for a, b in mine for c, d in intervals)

    def covers(self, intervals: Sequence[Interval]) -> bool:
        if len(self.intervals) > 1:
            return list(self.intervals) == list(intervals)
        start, stop = self.intervals[0]
        return start <= intervals[0][0] and intervals[-1][1] <= stop


@dataclass(eq=False)
class Action:
    """One thing that the device or the host does."""

    what: str
    """The operator, the collective, or "free"."""
    where: str
    """The unit and the phase in which it was issued."""
    queue: str
    tick: int
    clock: Clock
    """For each queue, the last action that comes before it, itself included."""
    reads: list[Region]
    writes: list[Region]

    def follows(self, other: Action) -> bool:
        return self.clock.get(other.queue, 0) >= other.tick

    def __str__(self) -> str:
        return f"{self.what} on {self.queue} ({self.where})"


@dataclass(eq=False)
class Access:
    """An action's access to some bytes."""

    action: Action
    intervals: Sequence[Interval]
    writes: bool


def intervals_of(tensor: torch.Tensor) -> Sequence[Interval]:
    """Returns the bytes of its storage in which a tensor lies, in order."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return ((start, start + tensor.numel() * size),) if tensor.numel() else ()
    return _apart(start, size, tensor.size(), tensor.stride()) if tensor.numel() else ()


@lru_cache(maxsize=4096)
def _apart(start: int, size: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> Sequence[Interval]:
    """Returns the bytes of a tensor that is not contiguous, by its first byte and those of an element."""
    run, outer = size, []
    for stride, length in sorted(zip(strides, lengths)):
        if stride == 0 or length == 1:
            continue
        if stride * size == run:
            run *= length
        else:
            outer.append([step * stride * size for step in range(length)])
    if math.prod(map(len, outer)) > _MOST_ROWS:
        return ((start, start + sum(steps[-1] for steps in outer) + run),)
    firsts = sorted(start + sum(steps) for steps in itertools.product(*outer))
    return tuple((first, first + run) for first in firsts)


def conflicts(action: Action) -> list[str]:
    """Returns the conflicts of an action with earlier ones, and remembers its accesses."""
    objections = []
    for writes, regions in ((False, action.reads), (True, action.writes)):
        for region in filter(lambda region: region.intervals, regions):
            objections += _conflicts(action, region, writes)
    return objections


def _conflicts(action: Action, region: Region, writes: bool) -> list[str]:
    block, kept, objections = region.block, [], []
    if block.freed is not None and block.freed is not action:
        return [f"{action} uses block {block.number}, which was freed by {block.freed}"]
    for access in block.accesses:
        before = access.action
        follows = action.follows(before)
        if not follows and (writes or access.writes) and region.overlaps(access.intervals):
            verb, did = "writes" if writes else "reads", "wrote" if access.writes else "read"
            size = f"{sum(stop - start for start, stop in region.intervals)} bytes"
            what = f"{action} {verb} {size} of a block of {block.nbytes} that {before} {did}"
            objections.append(f"{what}: no event orders them")
        if not (follows and (writes or not access.writes) and region.covers(access.intervals)):
            kept.append(access)
    kept.append(Access(action, region.intervals, writes))
    block.accesses = kept
    return objections
