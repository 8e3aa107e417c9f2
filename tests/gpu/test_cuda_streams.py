"""Order on the streams of a GPU: under torch's CUDA sanitizer, and as a trace of the profiler shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bed.paths import ROOT
from bed.scripts import python
from fronts import shard
from fsdp_wrap import CPUOffload
from fsdp_wrap._comm.device import accelerator_of
from fsdp_wrap.wrap import ModuleWrapPolicy
from on_cuda import on_devices, only_cuda, over_the_group, place_of

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.timeline import COMPUTE, record
from stream_programs import PROGRAMS

_PARTS = 6
_SCRIPT = Path(__file__).parent / "sanitized.py"


def _sanitize(*names, code):
    return python(_SCRIPT, *names, code=code)


def _names():
    """The programs of one rank: those of the script, which is not imported here since it sanitizes."""
    names = "import sanitized; print(*sanitized.NAMES)"
    return python("-c", names, folder=_SCRIPT.parent).out.split()


def test_programs_run_where_there_is_no_gpu():
    """The script is sound: what it reports on a GPU comes from the GPU."""
    if torch.cuda.is_available():
        pytest.skip("the sanitizer is on where there is a GPU")
    found = _sanitize("trains-flat", "offloads-composable", "by_hand", "ordered", "race", code=2)
    assert found.out.count("race: order: ") == 2, found


def test_most_programs_need_one_rank_only():
    names = _names()
    assert set(names) < set(PROGRAMS) and len(names) > 0.7 * len(PROGRAMS)


@only_cuda
def test_the_sanitizer_knows_the_events_of_torch():
    """Otherwise it would object to everything, or to nothing."""
    race = _sanitize("race", code=2)
    assert race.out.count("race: order: ") == 2, race
    _sanitize("ordered", code=0)


@only_cuda
@pytest.mark.parametrize("part", range(_PARTS))
def test_programs_under_the_sanitizer(part):
    _sanitize(*_names()[part::_PARTS], code=0)


class _Unit(nn.Module):
    """No gradient of it is half of all: where one is, memory is preferred to overlap."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        return x + self.layers(x).relu()


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("front", ["orig", "composable"])
@on_devices
def test_gathers_and_reductions_run_beside_products(rank, world_size, device, front, offload):
    """On streams of their own, which a trace tells apart; what is beside them is part of what they take."""
    place = place_of(device, rank)
    width, rows = (2048, 16384) if device == "cuda" else (16, 4)
    torch.manual_seed(0)
    module = nn.Sequential(*(_Unit(width) for _ in range(6))).to(place)
    with over_the_group(not offload):
        model = shard(front, module, ModuleWrapPolicy({_Unit}), cpu_offload=CPUOffload(offload))
        x = torch.rand(rows, width, device=place)

        def step():
            model(x).square().mean().backward()

        for _ in range(2):
            step()
        accelerator = accelerator_of(place)
        lanes = {} if accelerator is None else accelerator.lanes
        found = record(step, 2, {COMPUTE: None} | {name: lane._stream for name, lane in lanes.items()})
    assert len(found.waits) == 2
    if device == "cuda":
        assert found.busy(COMPUTE) > 0 and found.beside("gather") > 0, found
        if not offload:
            assert found.beside("reduce") > 0 and found.waits == [0, 0], found
