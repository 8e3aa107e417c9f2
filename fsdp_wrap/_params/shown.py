"""Whether sharded parameters are as they were left: shown, not written to; and what stands before them.

While they are, full parameters may stay in memory beside them, so that the next use gathers nothing. Which
may stay is a plan over the whole tree, made from what all ranks know: sizes, budgets, what trains, and the
order of units. When a unit happens to reshard has no part in it, since that may differ between ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch

from fsdp_wrap._core import REFUSED_HOOKS_OF, ModuleWriter, Place

if TYPE_CHECKING:
    from fsdp_wrap._params.layout import Layout, Written
    from fsdp_wrap._params.segment import Segment

_GONE = object()
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_SAMPLED = 64  # elements of a shard


class Shown(ModuleWriter):
    """What the places of sharded parameters show while all is as it should be.

    Args:
        places: For each original parameter, all that show it.
        tensors: What they show: parameters, or plain tensors, in whose place no parameter may stand.
    """

    def __init__(self, places: Sequence[Iterable[Place]], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(places, tensors)
        self._indices = [index for index, several in enumerate(places) for _ in several]
        self._registries, self._names, self._expected = zip(*self._params)
        self._distinct = [*dict.fromkeys(param for param in self._expected if param is not None)]

    def is_untouched(self) -> bool:
        """Whether nobody has put anything else there, nor a hook that cannot run."""
        found = map(dict.get, self._registries, self._names, repeat(_GONE))
        same = all(map(operator.is_, found, self._expected))
        return same and not any(map(REFUSED_HOOKS_OF, self._distinct))

    def replaced(self) -> Iterator[tuple[int, Any]]:
        """Yields what was put in the place of an original parameter, with its number; None for nothing."""
        for index, (registry, name, expected) in zip(self._indices, self._params):
            found = registry.get(name, _GONE)
            if found is not expected:
                yield index, None if found is _GONE else found

    def hooked(self) -> Iterator[int]:
        """Yields the numbers of parameters with hooks that cannot run."""
        for index, param in zip(self._indices, self._expected):
            if param is not None and REFUSED_HOOKS_OF(param):
                yield index


class Cover:
    """Tensors that stand before parameters, for who computes with them outside of their module's forward.

    Attributes show them; `parameters()`, and so optimizers, `zero_grad()` and state dicts, what is behind.

    Args:
        places: For each tensor, all that are to show it.
        tensors: The tensors.
    """

    def __init__(self, places: Iterable[Iterable[Place]], tensors: Iterable[torch.Tensor]) -> None:
        self._covers = [
            (module.__dict__, name, tensor)
            for several, tensor in zip(places, tensors)
            for module, name in several
        ]
        self._behind: list[Any] = []

    def put(self) -> None:
        """Lets the attributes show the tensors."""
        self._behind = [names.get(name, _GONE) for names, name, _ in self._covers]
        for names, name, tensor in self._covers:
            names[name] = tensor

    def take_away(self) -> None:
        """Lets the attributes show what they did before, where nobody has set them since."""
        for (names, name, tensor), behind in zip(self._covers, self._behind):
            if names.get(name) is tensor:
                names[name] = behind
                if behind is _GONE:
                    del names[name]


class Stay:
    """What is to be known of one segment's full parameters while they stay.

    Args:
        layout: The segment's.
        written: What the layout said when they were gathered.
    """

    def __init__(self, layout: Layout, written: Written) -> None:
        self._layout, self._written = layout, written
        self._trains = trains(layout)
        shard = layout.flat_param.detach()
        # Elsewhere a look would make the host wait for the device.
        self._sampled = _spread(shard) if shard.device.type == "cpu" else None
        self._sample = None if self._sampled is None else self._sampled.clone()

    def is_outdated(self, written: Written, stepped: bool) -> bool:
        """Whether the shard may have got other values since, as far as all ranks can tell alike.

        Args:
            written: What the layout says now.
            stepped: Whether any optimizer has stepped since. Not all that do move version counters.
        """
        return written != self._written or trains(self._layout) != self._trains or (stepped and self._trains)

    @property
    def was_written_unseen(self) -> bool:
        """Whether the shard was written to through an alias without a version counter, as `.data` is."""
        now, before = self._sampled, self._sample
        return now is not None and before is not None and not torch.equal(now, before)


def _spread(shard: torch.Tensor) -> torch.Tensor:
    """A view of some elements that lie evenly apart: of their bytes, since NaN equals nothing."""
    some = shard.view(-1)[:: max(1, shard.numel() // _SAMPLED)]
    return some[..., None].view(torch.uint8)


def trains(layout: Layout) -> bool:
    """Whether any of a layout's parameters needs a gradient now."""
    return True in map(_REQUIRES_GRAD, layout.sources)


class StayPlan:
    """Which segments of a tree may stay, within budgets of bytes. It keeps none of them alive.

    Attributes:
        chosen: Those segments.
        frozen: Those of them that do not train.
    """

    def __init__(self) -> None:
        self._candidates: list[tuple[ref[Segment], bool, int]] = []
        self.chosen: WeakSet[Segment] = WeakSet()
        self.frozen: WeakSet[Segment] = WeakSet()

    def choose(self, candidates: Iterable[tuple[Segment, int]]) -> bool:
        """Chooses the most useful segments: those that are frozen before others, then the smallest.

        Frozen ones are the same in all steps; of others a gather is saved until the next step only. Of small
        ones a byte saves more time, since any gather takes some.

        Args:
            candidates: The segments in the order of units, each with its unit's budget: so many bytes may
                stay in all once it does.

        Returns:
            Whether others are chosen than before.
        """
        listed = [(segment, trains(segment.layout), budget) for segment, budget in candidates]
        noted = [(ref(segment), training, budget) for segment, training, budget in listed]
        if noted == self._candidates:
            return False
        self._candidates, total = noted, 0
        self.chosen, self.frozen = WeakSet(), WeakSet()
        for segment, training, budget in sorted(listed, key=lambda each: (each[1], each[0].full.nbytes)):
            if segment.full.temporary and total + segment.full.nbytes <= budget:
                total += segment.full.nbytes
                self.chosen.add(segment)
                if not training:
                    self.frozen.add(segment)
        return True
