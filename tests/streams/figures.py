"""Prints what a simulated accelerator tells of memory and of order, by option and front-end.

    python tests/streams/figures.py

For each stream the most memory above the sharded state in a step, in units of the model, as a caching
allocator without `record_stream` sees it; how many products run beside gathers and reductions; how often the
host waits. Two ranks train four units of three matrices, each of which travels alone unless the option says
otherwise: they are small enough for that.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """Peaks of an option by stream, in units; how many of a step's collectives run beside products."""

    front: str
    option: str
    forward: dict[str, float]
    backward: dict[str, float]
    waits: int
    beside: int
    collectives: int


def measure(front: str, option: str) -> Row:
    rows: dict[int, Row] = {}

    def program(rank: int, device: Simulation) -> None:
        rows[rank] = _train(front, option, device)

    run_simulated(2, program)
    return rows[0]


def _train(front: str, option: str, device: Simulation) -> Row:
    options = {"travel_together_bytes": 0, **OPTIONS[option]}
    accumulates, in_place = options.pop("accumulates", False), options.pop("in_place", False)
    parts = [_unit(number) for number in range(UNITS)]
    own = set(parts)
    policy = lambda module, recurse, nonwrapped_numel: recurse or module in own  # noqa: E731
    model = shard(front, nn.Sequential(*parts), policy, **options)
    if in_place:
        set_gradients_in_place(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    x = torch.ones(1, SIDE)

    def step() -> tuple[dict[str, int], dict[str, int], int]:
        """Returns the peaks of the forward and of the backward by stream, and how often the host waited."""
        if accumulates:
            with no_sync(model):
                model(x).square().sum().backward()
        loss = model(x).square().sum()
        waits, forward = device.end_step()
        loss.backward()
        more, backward = device.end_step()
        optimizer.step()
        optimizer.zero_grad()
        last, _ = device.end_step()
        return forward, backward, len(waits) + len(more) + len(last)

    for _ in range(STEPS - 1):
        step()
    device.end_step()
    rest = device.end_step()[1]
    begin = len(device.actions)
    forward, backward, waits = step()
    collectives = [
        action
        for action in device.actions[begin:]
        if action.what in ("all_gather", "reduce_scatter", "all_reduce")
        or (action.what == "aten::copy_" and action.queue == "gather" and option == "offload")
    ]
    beside = sum(map(bool, products_beside(device.actions[begin:], collectives)))
    return Row(front, option, _above(forward, rest), _above(backward, rest), waits, beside, len(collectives))


def _unit(number: int) -> nn.Module:
    generator = torch.Generator().manual_seed(number)
    unit = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(MATRICES)))
    for param in unit.parameters():
        param.data = (torch.rand(param.shape, generator=generator) - 0.5) / SIDE
    return unit


def _above(peaks: dict[str, int], rest: dict[str, int]) -> dict[str, float]:
    """Peaks in units, without what is there at rest and without streams that allocate nothing."""
    above = {name: (peak - rest.get(name, 0)) / UNIT for name, peak in peaks.items()}
    return {name: units for name, units in above.items() if units > 0 or name == "compute"}


HEAD = """\
| option | front-end | forward | backward | collectives beside products | waits of the host |
|---|---|---:|---:|---:|---:|"""


def shown(row: Row) -> str:
    forward, backward = (
        ", ".join(
            f"{value:.2f}" + (f" ({name})" if name != "compute" else "") for name, value in units.items()
        )
        for units in (row.forward, row.backward)
    )
    beside = f"{row.beside} of {row.collectives}"
    return f"| {row.option} | {row.front} | {forward} | {backward} | {beside} | {row.waits} |"


if __name__ == "__main__":
    print(HEAD)
    for option in OPTIONS:
        for front in FRONTS if option in ALL_HAVE else FRONTS[:2]:
            print(shown(measure(front, option)), flush=True)
