"""Host costs of a step, counted in calls: each unit costs the same, however many units and ranks there are.

On a process group that sends nothing, in a process of its own.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_wrap
from bed.paths import TESTS
from bed.scripts import python
from fsdp_wrap import FullyShardedDataParallel

FRONTS = {
    "original": partial(FullyShardedDataParallel, use_orig_params=True),
    "flat": partial(FullyShardedDataParallel, use_orig_params=False),
    "fully_shard": fsdp_wrap.fully_shard,
}
PARAMS, FEW, MORE, MANY = 4, 2, 6, 24
"""Parameters of a unit, and numbers of units."""


class Sum(nn.Module):
    """A unit of as many parameters as asked for, in one module, whose forward calls no other."""

    def __init__(self, params: int) -> None:
        super().__init__()
        self.names = [f"p{index}" for index in range(params)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        return x


def calls_of_a_step(front: str, units: int, together: bool) -> int:
    """Counts the calls of Python functions in one step; on the CPU backward runs in this thread as well."""
    model: Any = nn.Sequential(*(FRONTS[front](Sum(PARAMS)) for _ in range(units)))
    model = FRONTS[front](model, travel_together_bytes=together << 30)  # whatever padding there is
    x = torch.randn(8, 8)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(12):  # by then positions have found whom they look for
        model(x).sum().backward()
        model.zero_grad()
    gc.collect()
    gc.disable()  # what it calls for earlier models, whenever that is, is no part of a step
    sys.setprofile(count)
    model(x).sum().backward()
    sys.setprofile(None)
    gc.enable()
    return calls


def main() -> None:
    """Prints the calls of a step by ranks, front, whether units travel together, and units."""
    torch.set_num_threads(1)
    counts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ranks, sizes in ((8, (FEW, MORE, MANY)), (1024, (MANY,))):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            for front in FRONTS:
                for units in sizes:
                    for together in (False, True):
                        key = f"{ranks} {front} {together} {units}"
                        counts[key] = calls_of_a_step(front, units, together)
            dist.destroy_process_group()
    print(json.dumps(counts))


@cache
def counted() -> dict[str, int]:
    counts: dict[str, int] = json.loads(python(__file__, env={"PYTHONPATH": str(TESTS)}).out)
    return counts


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_a_unit_costs_the_same_with_many_units_and_ranks(front, together):
    few, more, many = (counted()[f"8 {front} {together} {units}"] for units in (FEW, MORE, MANY))
    assert (many - more) / (MANY - MORE) == pytest.approx((more - few) / (MORE - FEW), rel=0.02)
    assert counted()[f"1024 {front} {together} {MANY}"] == pytest.approx(many, rel=0.02)


if __name__ == "__main__":
    main()
