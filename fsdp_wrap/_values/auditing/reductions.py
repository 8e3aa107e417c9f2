"""`Reductions`: whether reduced shards are the sums of the ranks' gradients, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp_wrap._params import Layout
from fsdp_wrap._values.auditing.corruption import REDUCTION, Corruption
from fsdp_wrap._values.auditing.parts import AuditedSegment, Key
from fsdp_wrap._values.statistics import block_sums

_LEAST_BLOCK = 16
_MOST_BLOCKS = 4096
"""Bound for each shard: large ones have larger blocks, so that little travels."""


@dataclass
class _Sum:
    """Block sums of one segment: of all owners' parts as sent, and of this rank's reduced shard."""

    part: AuditedSegment
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

    def checks(self, part: AuditedSegment) -> bool:
        """Whether a unit's sums are those that its communicators make of all ranks' numbers."""
        buffers, plug_ins = part.unit.buffers, part.unit.plug_ins
        if buffers.gradients.has_own_reduction or plug_ins.takes or plug_ins.averaged:
            return False
        ranks = buffers.communicator.size * buffers.replicas.size
        whole = ranks == len(self._members) and buffers.communicator.members <= self._members
        return whole and buffers.transport is buffers.communicator

    def send(self, part: AuditedSegment, full: torch.Tensor) -> None:
        """Notes a complete reduce buffer; what was summed over a part of the ranks before counts too."""
        layout, adds = part.layout, part.segment.gradients.partial is not None
        before = self._sent.get(part.key)
        if not self.checks(part) or (adds and before is None):  # of a step that was not drawn
            return
        rows = full.view(part.communicator.size, -1)[:, : layout.shard_numel - layout.noted_numel]
        sums = block_sums(rows, _block_of(layout))
        if adds and before is not None:
            self._sent[part.key] = _Sum(part, sums + before.sent, before.passes + 1)
        else:
            self._sent[part.key] = _Sum(part, sums, 1)

    def drop(self) -> None:
        """Forgets the reductions of a backward that has raised: the next may have another divisor."""
        self._sent.clear()
        self._done.clear()

    def take(self, part: AuditedSegment, reduced: torch.Tensor) -> None:
        """Notes a reduced shard."""
        noted, layout = self._sent.pop(part.key, None), part.layout
        if noted is None:
            return
        own = reduced[: layout.shard_numel - layout.noted_numel].unsqueeze(0)
        noted.reduced = block_sums(own, _block_of(layout))[0, 0]
        before = self._done.get(part.key)
        if before is not None and before.reduced is not None:
            noted.sent, noted.reduced = noted.sent + before.sent, noted.reduced + before.reduced
            noted.passes += before.passes
        self._done[part.key] = noted

    def collect(self, common: Iterable[Key]) -> torch.Tensor:
        """Returns the sums that this rank has sent, to be added over all ranks; drops other segments."""
        done, self._done = self._done, {}
        self._done = {key: done[key] for key in common}
        sent = [noted.sent.reshape(-1).cpu() for noted in self._done.values()]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *sent])

    def check(self, step: int, totals: torch.Tensor) -> Iterator[Corruption]:
        """Yields the shards that are not the sums of all ranks."""
        done, self._done = self._done, {}
        sizes = [noted.sent.numel() for noted in done.values()]
        for noted, total in zip(done.values(), torch.split(totals, sizes) if sizes else ()):
            part, numel = noted.part, _block_of(noted.part.layout)
            own = total.view(noted.sent.shape)[:, part.communicator.rank]
            wrong = _wrong_blocks(noted, own, len(self._members))
            if len(wrong):
                told = (
                    "It is not the sum of the gradients that the ranks have sent: made here, or sent wrong. "
                    f"Counted in blocks of {numel} elements"
                )
                element = part.element_at(int(wrong[0]) * numel)
                yield part.corruption(self._rank, step, REDUCTION, told, element, count=len(wrong))


def _block_of(layout: Layout) -> int:
    return max(_LEAST_BLOCK, -(-layout.shard_numel // _MOST_BLOCKS))


def _wrong_blocks(noted: _Sum, own: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns the numbers of the blocks that differ by more than rounding can explain."""
    segment, numel = noted.part.segment, _block_of(noted.part.layout)
    dtypes, gradients = segment.dtypes, segment.gradients
    factor = gradients.factor
    assert noted.reduced is not None
    reduced, (summed, absolute) = noted.reduced.cpu(), own.unbind()
    sums, kept = torch.finfo(dtypes.reduce), torch.finfo(dtypes.grad)
    roundings = ranks - 1 + noted.passes
    relative = roundings * sums.eps / 2 + numel * torch.finfo(torch.float64).eps * (ranks + noted.passes)
    relative += kept.eps / 2 * ((dtypes.grad != dtypes.reduce) + (math.frexp(factor)[0] != 0.5))
    least = numel * (roundings + 2) * max(map(_smallest, (dtypes.reduce, dtypes.grad)))
    bound = 1.01 * relative * absolute * factor + least
    knows = absolute < min(sums.max, kept.max) / 2  # else a sum may overflow, and False for NaN
    return (knows & ~((reduced - summed * factor).abs() <= bound)).nonzero().flatten()


def _smallest(dtype: torch.dtype) -> float:
    """Returns the absolute error of an operation on tiny numbers, which devices may take for zero."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (info.eps if dtype == torch.float16 else 1.0)
