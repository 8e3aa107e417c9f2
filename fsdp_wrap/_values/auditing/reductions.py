"""`Reductions`: whether reduced shards are the sums of the ranks' gradients, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._params import Layout, Segment
from fsdp_wrap._runtime import Unit
from fsdp_wrap._values.auditing.corruption import REDUCTION, Corruption
from fsdp_wrap._values.auditing.places import Key, element_at
from fsdp_wrap._values.statistics import block_sums

_LEAST_BLOCK = 16
_MOST_BLOCKS = 4096
"""Bound for each shard: large ones have larger blocks, so that little travels."""


@dataclass
class _Sum:
    """Block sums of one segment: of all owners' parts as sent, and of this rank's reduced shard."""

    unit: Unit
    layout: Layout
    segment: Segment
    sent: torch.Tensor
    passes: int
    reduced: torch.Tensor | None = None


class Reductions:
    """The reductions of one rank in a drawn step.

    Args:
        members: All ranks of the model: units on some of them are not checked.
        rank: Global rank.
    """

    def __init__(self, members: Sequence[int], rank: int) -> None:
        self._members, self._rank = {*members}, rank
        self._sent: dict[Key, _Sum] = {}
        self._done: dict[Key, _Sum] = {}

    @property
    def done(self) -> list[Key]:
        """The segments whose reductions are over."""
        return [*self._done]

    def checks(self, unit: Unit, layout: Layout) -> bool:
        """Whether a unit's sums are those that its communicators make of all ranks' numbers."""
        handle = unit.handle
        if handle is None or handle.sums is not None or handle.has_own_reduction:
            return False
        if handle.transport is not handle.communicator or layout.average_hook is not None:
            return False
        ranks = handle.communicator.size * handle.replicas.size
        return ranks == len(self._members) and handle.communicator.members <= self._members

    def send(self, unit: Unit, key: Key, full: torch.Tensor) -> None:
        """Notes a complete reduce buffer; what was summed over a part of the ranks before counts too."""
        layout = unit.layouts[key.segment]
        if not self.checks(unit, layout):
            return
        assert unit.handle is not None
        segment = unit.segments[key.segment]
        rows = full.view(unit.handle.communicator.size, -1)
        rows = rows[:, : layout.shard_numel - layout.noted_numel]
        sums, passes = block_sums(rows, _block_of(layout)), 1
        before = self._sent.get(key)
        if before is not None and segment.gradients.partial is not None:
            sums, passes = sums + before.sent, before.passes + 1
        elif segment.gradients.partial is not None:
            return  # of a step that was not drawn
        self._sent[key] = _Sum(unit, layout, segment, sums, passes)

    def take(self, key: Key, reduced: torch.Tensor) -> None:
        """Notes a reduced shard."""
        found = self._sent.pop(key, None)
        if found is None:
            return
        own = reduced[: found.layout.shard_numel - found.layout.noted_numel].unsqueeze(0)
        found.reduced = block_sums(own, _block_of(found.layout))[0, 0]
        before = self._done.get(key)
        if before is not None and before.reduced is not None:
            found.sent, found.reduced = found.sent + before.sent, found.reduced + before.reduced
            found.passes += before.passes
        self._done[key] = found

    def collect(self, common: Iterable[Key]) -> torch.Tensor:
        """Returns the sums that this rank has sent, to be added over all ranks; drops other segments."""
        done, self._done = self._done, {}
        self._done = {key: done[key] for key in common}
        sent = [each.sent.reshape(-1).cpu() for each in self._done.values()]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *sent])

    def check(self, step: int, totals: torch.Tensor) -> Iterator[Corruption]:
        """Yields the shards that are not the sums of all ranks."""
        done, self._done = self._done, {}
        sizes = [each.sent.numel() for each in done.values()]
        for (key, each), total in zip(done.items(), torch.split(totals, sizes) if sizes else ()):
            assert each.unit.handle is not None
            rank, numel = each.unit.handle.communicator.rank, _block_of(each.layout)
            wrong = _wrong_blocks(each, total.view(each.sent.shape)[:, rank], len(self._members))
            if len(wrong):
                fqn, index, shape = element_at(each.layout, key.unit, rank, int(wrong[0]) * numel)
                what = f"the reduced gradient of '{fqn}'"
                told = (
                    "It is not the sum of the gradients that the ranks have sent: made here, or sent wrong. "
                    f"Counted in blocks of {numel} elements"
                )
                yield Corruption(
                    self._rank, step, REDUCTION, key.unit, what, told, index, shape, count=len(wrong)
                )


def _block_of(layout: Layout) -> int:
    return max(_LEAST_BLOCK, -(-layout.shard_numel // _MOST_BLOCKS))


def _wrong_blocks(each: _Sum, own: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns the numbers of the blocks that differ by more than rounding can explain."""
    dtypes, gradients, numel = each.segment.dtypes, each.segment.gradients, _block_of(each.layout)
    factor = 1.0 if gradients.factor is None else gradients.factor.item()
    assert each.reduced is not None
    reduced, (summed, absolute) = each.reduced.cpu(), own.unbind()
    sums, kept = torch.finfo(dtypes.reduce), torch.finfo(dtypes.grad)
    roundings = ranks - 1 + each.passes
    relative = roundings * sums.eps / 2 + numel * torch.finfo(torch.float64).eps * (ranks + each.passes)
    relative += kept.eps / 2 * ((dtypes.grad != dtypes.reduce) + (math.frexp(factor)[0] != 0.5))
    least = numel * (roundings + 2) * max(map(_smallest, (dtypes.reduce, dtypes.grad)))
    bound = 1.01 * relative * absolute * factor + least
    knows = absolute < min(sums.max, kept.max) / 2  # else a sum may overflow, and False for NaN
    return (knows & ~((reduced - summed * factor).abs() <= bound)).nonzero().flatten()


def _smallest(dtype: torch.dtype) -> float:
    """Returns the absolute error of an operation on tiny numbers, which devices may take for zero."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)
