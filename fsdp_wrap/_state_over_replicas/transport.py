"""`StagedTransport`: gathers and reductions in two stages, one over the replicas and one within the copy.

With R copies on S ranks each, an unsharded buffer is R regions of S shards. Rank s of copy r holds shard s of
region r. Its *copy part*, shard s of every region, is all that it would hold if its copy alone were sharded:
the secondary partition of ZeRO++ (hpZ; Wang et al., 2023, arXiv:2306.10209).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from fsdp_wrap._comm import Buffer, Communicator, Pending, Then, accelerator_of
from fsdp_wrap._params import Buffers, Segment
from fsdp_wrap._state_over_replicas.copy_part import CopyPart
from fsdp_wrap._state_over_replicas.stage import Stage


class StagedTransport:
    """A `Transport` of a unit whose state is sharded over replicas as well.

    A gather fills the copy part over the replicas, where the shards may have changed, and then the buffer
    within the copy. The copy part stays. A reduction sums within the copy, and then over the replicas.

    Args:
        within: The ranks of this copy.
        across: This rank's counterparts in all copies.
        buffers: The unit's.
    """

    compresses_reductions = False

    def __init__(self, within: Communicator, across: Communicator, buffers: Buffers) -> None:
        self._unit_buffers, self.positions = weakref.ref(buffers), within.positions
        self._within, self._across = Stage(within), Stage(across)
        self._accelerator = accelerator_of(within.device)
        self._parts: dict[Segment, CopyPart] = {}
        self.keeps_notes = within.keeps_notes and across.keeps_notes

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        """Gathers parameters, over the replicas only if they may have changed since the last time."""
        for buffer in buffers:
            buffer.allocate()
        parts = self._parts_of(buffers)
        captures = self._accelerator is not None and self._accelerator.captures  # for steps to come
        outdated = [part for part in parts if captures or part.is_outdated()]
        within, across = self._within.communicator, self._across.communicator

        def fill_own() -> None:
            fill()
            for part in outdated:
                part.take(across.rank)

        def place() -> None:
            for part in parts:
                part.give()

        def gather_within() -> Pending:
            for part in outdated:
                part.end()
            return within.all_gather([region for part in parts for region in part.regions], place)

        if not outdated:
            self._within.finish_earlier()
            return gather_within()
        for part in outdated:
            part.begin()
        self._across.finish_earlier()
        filled = across.all_gather([part.data.view(-1) for part in outdated], fill_own)
        return self._then(filled, self._within, gather_within)

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        """Sums gradients within the copy, and these sums over the replicas."""
        within, across = self._within.communicator, self._across.communicator
        sums = [within.empty(across.size * shard.numel(), shard.dtype) for shard in shards]
        self._within.finish_earlier()
        summed = within.reduce_scatter(
            [shard for tensor in sums for shard in tensor.chunk(across.size)],
            [region for tensor in full for region in tensor.chunk(across.size)],
        )
        return self._then(summed, self._across, lambda: across.reduce_scatter(shards, sums))

    def _then(self, first: Pending, stage: Stage, issue: Callable[[], Pending]) -> Pending:
        """Lets the collectives of a second stage follow those of the first."""
        if self._accelerator is not None:  # in the order of their lane
            return Then([first, issue()])
        return stage.queue(first, issue)

    def _parts_of(self, gathered: list[Buffer]) -> list[CopyPart]:
        buffers = self._unit_buffers()
        assert buffers is not None
        known, parts = self._parts, []
        within, across = self._within.communicator, self._across.communicator
        self._parts = {}  # without those of segments that were made anew
        for segment, written in zip(buffers.segments, buffers.written):
            part = known.get(segment) or CopyPart(segment, across.size, within.size, within.rank)
            self._parts[segment] = part
            if segment.gathered in gathered:
                part.follow(written)
                parts.append(part)
        return parts
