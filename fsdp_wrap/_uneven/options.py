"""`RoundOptions`: what is changed of the units' options while ranks may run out of batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fsdp_wrap._batching import follow_setting
from fsdp_wrap._by_hand import reshard
from fsdp_wrap._runtime import Step, Unit


class RoundOptions:
    """Changes options of the units of some models, and changes them back; made where the context begins.

    Args:
        steps: The steps of the models.
        averaged: Units whose gradients each round averages over the ranks that have a batch.
    """

    def __init__(self, steps: Sequence[Step], averaged: Iterable[Unit]) -> None:
        self._steps = steps
        self._before: dict[Unit, dict[str, Any]] = {}
        self._divided = {unit: unit.buffers.gradients.contributors for unit in averaged if unit.params}

    def gather_wholes(self) -> None:
        """Makes units free all of their full parameters: not all ranks would have kept a part of them."""
        for step in self._steps:
            for unit in step.units:
                if unit.options.reshards_within is not None:
                    reshard(unit)
                    self._change(unit, reshards_within=None)

    def share_nothing(self) -> None:
        """Gives each unit collectives of its own, from the next forward on."""
        for step in self._steps:
            self._change(step.root, travel_together_bytes=0)
            follow_setting(step)  # now: ranks without that forward forget plans as well

    def follow_others(self) -> None:
        """Leaves it to other ranks whether gradients are reduced."""
        for step in self._steps:
            for unit in step.units:
                if not (unit.options.syncs and unit.options.sums_over_replicas):
                    self._change(unit, syncs=True, sums_over_replicas=True)

    def average_over(self, part: float) -> None:
        """Averages the gradients of the next backwards over a part of the ranks."""
        for unit, contributors in self._divided.items():
            if unit.buffers.gradients.contributors != contributors * part:
                unit.buffers.gradients.divide_by(contributors * part)

    def restore(self) -> None:
        """Restores all options."""
        self.average_over(1)
        for unit, options in self._before.items():
            unit.set(**options)
        self._before.clear()
        for step in self._steps:  # now: only some ranks have begun a forward with other options
            follow_setting(step)

    def _change(self, unit: Unit, **options: Any) -> None:
        before = self._before.setdefault(unit, {})
        for name in options:
            before.setdefault(name, getattr(unit.options, name))
        unit.set(**options)
