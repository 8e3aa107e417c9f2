"""Kept segments: full parameters that stay in memory while their unit is sharded, and are not gathered next.

The plan for a whole tree follows from what all ranks know: sizes, budgets, what trains, and the order of
units. The moment at which a unit happens to reshard has no part in it, since it may differ between ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from weakref import WeakSet, ref

import torch

from fsdp_wrap._params.layout import Layout, Written
from fsdp_wrap._params.segment import Segment

_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class KeptSegment:
    """The state of one segment's shard when its full parameters, which are kept, were gathered."""

    def __init__(self, layout: Layout, written: Written) -> None:
        self._layout, self._written = layout, written
        self._trains = trains(layout)
        # Elsewhere a look would make the host wait for the device; in a plan there are no numbers.
        on_host = layout.flat_param.untyped_storage().device.type == "cpu"
        self._sampled = layout.sample() if on_host else None
        self._sample = None if self._sampled is None else self._sampled.clone()

    def is_outdated(self, written: Written, stepped: bool) -> bool:
        """Whether the shard may have other values now, as far as all ranks can tell alike.

        Args:
            written: The layout's present `written()`.
            stepped: Whether any optimizer has stepped since. Not all that do move version counters.
        """
        return written != self._written or trains(self._layout) != self._trains or (stepped and self._trains)

    @property
    def was_written_unseen(self) -> bool:
        """Whether the shard was written to through an alias without a version counter, as `.data` is."""
        now, before = self._sampled, self._sample
        return now is not None and before is not None and not torch.equal(now, before)


def trains(layout: Layout) -> bool:
    """Whether any of a layout's parameters needs a gradient now."""
    return True in map(_REQUIRES_GRAD, layout.sources)


class KeptSegmentsPlan:
    """The segments of a tree that may be kept within budgets of bytes; it keeps none of them alive.

    Attributes:
        chosen: The segments to keep.
        frozen: The chosen segments that do not train.
    """

    def __init__(self) -> None:
        self._candidates: list[tuple[ref[Segment], bool, int]] = []
        self.chosen: Collection[Segment] = ()
        self.frozen: Collection[Segment] = ()

    def choose(self, candidates: Iterable[tuple[Segment, int]]) -> None:
        """Chooses the most useful segments, frozen ones before others, then the smallest.

        Frozen ones are the same in all steps; the others save a gather until the next step only. A byte of
        small ones saves more time, since any gather takes some.

        Args:
            candidates: The segments in the order of units, each with its unit's budget: the most bytes that
                all kept segments may have together once this one is among them.
        """
        listed = [(segment, trains(segment.layout), budget) for segment, budget in candidates]
        noted = [(ref(segment), training, budget) for segment, training, budget in listed]
        if noted == self._candidates:
            return
        self._candidates, total = noted, 0
        self.chosen, self.frozen = chosen, frozen = WeakSet[Segment](), WeakSet[Segment]()
        for segment, training, budget in sorted(listed, key=lambda each: (each[1], each[0].full.nbytes)):
            if segment.full.temporary and total + segment.full.nbytes <= budget:
                total += segment.full.nbytes
                chosen.add(segment)
                if not training:
                    frozen.add(segment)
