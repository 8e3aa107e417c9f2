"""Prints what a simulated accelerator tells of memory and of order, by option and front-end.

    python tests/streams/figures.py

For each stream the most memory above the sharded state in a step, in units of the model, as a caching
allocator without `record_stream` sees it; how many products run beside gathers and reductions; how often the
host waits. Two ranks train four units of three matrices, each of which travels alone unless the option says
otherwise: they are small enough for that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
from torch import nn

from bed.accelerator import Simulation, run_simulated
from fronts import FRONTS, SIDE, no_sync, shard
from fsdp_wrap import set_gradients_in_place
from stream_programs import BF16, NO_SHARD, OFFLOAD, TOGETHER, products_beside

UNITS, STEPS = 4, 4
MATRICES = 3  # with two, one gradient would be half of a unit: memory is then preferred to overlap
UNIT = MATRICES * SIDE * SIDE * 4
"""Bytes of a unit."""

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "units that travel together": {"travel_together_bytes": TOGETHER},
    "forward_prefetch": {"forward_prefetch": True},
    "gradients in place": {"in_place": True},
    "accumulation": {"accumulates": True},
    "bf16 parameters": {"mixed_precision": BF16},
    "NO_SHARD": {"sharding_strategy": NO_SHARD},
    "offload": {"cpu_offload": OFFLOAD},
}
ALL_HAVE = ("nothing else", "units that travel together", "gradients in place", "accumulation", "offload")


@dataclass(frozen=True)
class Row:
    """One option of one front-end.

    Attributes:
        forward: Most bytes above the state in a forward, in units; by stream.
        backward: The same in a backward, gradients counted.
        waits: Of the host in a step.
        beside: Of the gathers and reductions in a step, beside how many a product may run.
        collectives: How many there are.
    """

    front: str
    option: str
    forward: dict[str, float]
    backward: dict[str, float]
    waits: int
    beside: int
    collectives: int


def rows() -> list[Row]:
    """Trains with each option, by each front-end that has it."""
    return [
        measure(front, option)
        for option in OPTIONS
        for front in FRONTS
        if front != "composable" or option in ALL_HAVE
    ]


def measure(front: str, option: str) -> Row:
    """Trains by one front-end with one option."""
    found: dict[int, Row] = {}

    def program(rank: int, device: Simulation) -> None:
        found[rank] = _Training(front, option, device).row()

    run_simulated(2, program)
    return found[0]


class _Training:
    """A model in training on a simulated accelerator."""

    def __init__(self, front: str, option: str, device: Simulation) -> None:
        options = {"travel_together_bytes": 0, **OPTIONS[option]}
        self._accumulates, in_place = options.pop("accumulates", False), options.pop("in_place", False)
        self._front, self._option, self._device = front, option, device
        parts = [_unit(number) for number in range(UNITS)]
        own = set(parts)
        policy = lambda module, recurse, nonwrapped_numel: recurse or module in own  # noqa: E731
        self._model = shard(front, nn.Sequential(*parts), policy, **options)
        if in_place:
            set_gradients_in_place(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self._x = torch.ones(1, SIDE)

    def row(self) -> Row:
        for _ in range(STEPS - 1):
            self._step()
        self._device.end_step()
        rest = self._device.end_step()[1]
        begin = len(self._device.actions)
        forward, backward, waits = self._step()
        collectives = [
            action
            for action in self._device.actions[begin:]
            if action.what in ("all_gather", "reduce_scatter", "all_reduce")
            or (action.what == "aten::copy_" and action.queue == "gather" and self._option == "offload")
        ]
        beside = sum(map(bool, products_beside(self._device.actions[begin:], collectives)))
        return Row(
            self._front,
            self._option,
            _above(forward, rest),
            _above(backward, rest),
            waits,
            beside,
            len(collectives),
        )

    def _step(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Returns the peaks of the forward and of the backward by stream, and how often the host waited."""
        if self._accumulates:
            with no_sync(self._model):
                self._model(self._x).square().sum().backward()
        loss = self._model(self._x).square().sum()
        waits, forward = self._device.end_step()
        loss.backward()
        more, backward = self._device.end_step()
        self._optimizer.step()
        self._optimizer.zero_grad()
        last, _ = self._device.end_step()
        return forward, backward, len(waits) + len(more) + len(last)


def _unit(number: int) -> nn.Module:
    """A unit, the same on ranks that are threads."""
    generator = torch.Generator().manual_seed(number)
    unit = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES)))
    for param in unit.parameters():
        param.data = (torch.rand(param.shape, generator=generator) - 0.5) / SIDE
    return unit


def _above(peaks: dict[str, int], rest: dict[str, int]) -> dict[str, float]:
    """Peaks in units, without what is there at rest and without streams that allocate nothing."""
    above = {name: (peak - rest.get(name, 0)) / UNIT for name, peak in peaks.items()}
    return {name: units for name, units in above.items() if units > 0 or name == "compute"}


def table(found: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| option | front-end | forward | backward | collectives beside products | waits of the host |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in found:
        lines.append(
            f"| {row.option} | {row.front} | {_shown(row.forward)} | {_shown(row.backward)} "
            f"| {row.beside} of {row.collectives} | {row.waits} |"
        )
    return "\n".join(lines)


def _shown(units: dict[str, float]) -> str:
    return ", ".join(
        f"{value:.2f}" + (f" ({name})" if name != "compute" else "") for name, value in units.items()
    )


if __name__ == "__main__":
    print(table(rows()))
