"""Host costs of a step, counted in calls: per unit, per parameter, by cause, with more units and ranks.

On a process group that sends nothing, in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
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
from bed.paths import ROOT, TESTS
from bed.scripts import python

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.causes import BACKWARD, CAUSES, FORWARD, LEAF, TORCH, calls_by_cause
from fsdp_wrap import FullyShardedDataParallel
from fsdp_wrap._runtime import Unit

FRONTS = {
    "original": partial(FullyShardedDataParallel, use_orig_params=True),
    "flat": partial(FullyShardedDataParallel, use_orig_params=False),
    "fully_shard": fsdp_wrap.fully_shard,
}
# Python functions that a step may call for one more unit of four parameters, and for one more parameter.
MOST = {"original": (93, 2), "flat": (92, 2), "fully_shard": (86, 2)}
# The same where each unit travels alone.
MOST_ALONE = {"original": (116, 2), "flat": (115, 2), "fully_shard": (116, 2)}
# Of the library's, by cause: those that one more unit takes, and one more parameter. Where nothing is due, a
# unit keeps its parameters, and its gradients accumulate.
BY_CAUSE: dict[str, list[tuple[int, float]]] = {
    "fsdp_wrap, due": [(10, 1), (40, 0), (5, 0), (22, 0.1), (6, 0), (2, 0)],
    "fsdp_wrap_grad_op, not due": [(11, 1), (37, 0), (15, 0), (29, 2), (0, 0), (0, 0)],
    "fully_shard, due": [(10, 1), (40, 0), (5, 0), (22, 1), (4, 0), (2, 0)],
    "fully_shard_keep, not due": [(11, 1), (37, 0), (15, 0), (33, 3), (0, 0), (0, 0)],
}
NAMES = (
    *("hooks", "deciding", "showing parameters", "shards and gradients", "buffers and collectives"),
    "positions and waiting",
)
MOST_BY_CAUSE = {case: dict(zip(NAMES, most, strict=True)) for case, most in BY_CAUSE.items()}
# Those that make the parameters of a unit usable: where it travels alone, since another may have gathered.
MOST_TO_UNSHARD = {"original": 14, "flat": 14, "fully_shard": 16}

SMALL, MANY = ((2, 4), (6, 4), (6, 16)), (24, 4)
"""Units, and parameters of each."""


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


def calls_of_a_step(front: str, units: int, params: int, together: bool = True) -> tuple[int, int]:
    """Counts the calls of Python functions in one step; on the CPU backward runs in this thread as well.

    Returns:
        All of them, and those that the first unshard of a unit takes.
    """
    model: Any = nn.Sequential(*(FRONTS[front](Sum(params)) for _ in range(units)))
    model = FRONTS[front](model, travel_together_bytes=together << 30)  # whatever padding there is
    x = torch.randn(8, 8)
    calls, first, last = 0, 0, 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, first, last
        calls += event == "call"
        if frame.f_code is Unit.unshard.__code__ and not last:
            first, last = (calls, 0) if event == "call" else (first, calls)

    for _ in range(12):  # by then positions have found whom they look for
        model(x).sum().backward()
        model.zero_grad()
    gc.collect()
    gc.disable()  # what it calls for earlier models, whenever that is, is no part of a step
    sys.setprofile(count)
    model(x).sum().backward()
    sys.setprofile(None)
    gc.enable()
    return calls, last - first + 1


def main() -> None:
    """Prints the calls of a step by ranks, front, units and parameters of each."""
    torch.set_num_threads(1)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ranks, sizes in ((8, [*SMALL, MANY]), (1024, [MANY])):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            for front in FRONTS:
                for units, params in sizes:
                    key = f"{ranks} {front} {units} {params}"
                    found[key] = calls_of_a_step(front, units, params)
                    if (units, params) != MANY:
                        found[f"alone {key}"] = calls_of_a_step(front, units, params, together=False)
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        causes = {
            case: calls_by_cause(case.partition(",")[0], case.endswith(", due")) for case in MOST_BY_CAUSE
        }
        dist.destroy_process_group()
    print(json.dumps([found, causes]))


@cache
def _found() -> Any:
    path = os.pathsep.join(map(str, (ROOT, TESTS)))
    return json.loads(python(__file__, env={"PYTHONPATH": path}).out)


def counted() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = _found()[0]
    return found


@pytest.mark.parametrize("front", FRONTS)
def test_calls_per_unit_and_parameter_are_few(front):
    for travels, (most_per_unit, most_per_param) in (("", MOST[front]), ("alone ", MOST_ALONE[front])):
        small, more, wider = (counted()[f"{travels}8 {front} {size}"][0] for size in ("2 4", "6 4", "6 16"))
        assert (more - small) / 4 <= most_per_unit
        assert (wider - more) / 6 / 12 <= most_per_param
    calls = {size: calls for size, (calls, _) in counted().items()}
    few = (calls[f"8 {front} 6 4"] - calls[f"8 {front} 2 4"]) / 4
    many = (calls[f"8 {front} 24 4"] - calls[f"8 {front} 6 4"]) / 18
    assert many == pytest.approx(few, rel=0.02)
    assert calls[f"1024 {front} 24 4"] == pytest.approx(calls[f"8 {front} 24 4"], rel=0.02)
    taken = [unshard for size, (_, unshard) in counted().items() if f" {front} " in size]
    assert max(taken) <= MOST_TO_UNSHARD[front]


@pytest.mark.parametrize("case", MOST_BY_CAUSE)
def test_calls_by_cause_are_few(case):
    table = _found()[1][case]
    taken = {cause: (row[FORWARD] + row[BACKWARD], row[LEAF]) for cause, row in table.items()}
    assert taken.pop(TORCH)[0] < 40
    assert set(taken) == {*CAUSES} - {TORCH} == set(MOST_BY_CAUSE[case])
    for cause, (unit, leaf) in taken.items():
        most, most_per_leaf = MOST_BY_CAUSE[case][cause]
        assert unit <= most and leaf <= most_per_leaf, cause


if __name__ == "__main__":
    main()
