"""Memory of a GPU, where the host waits for it, and order on its streams: under a sanitizer, in traces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bed import ranks
from bed.paths import ROOT
from bed.scripts import python
from fronts import either_front, no_sync, shard
from fsdp_wrap import CPUOffload, ShardingStrategy, record_events
from fsdp_wrap._comm.device import accelerator_of
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, loss_of, tokens
from on_cuda import each_device, memory_of, no_waiting, on_devices, only_cuda, over_the_group, place_of
from stream_programs import BF16, NO_SHARD, OFFLOAD, PROGRAMS, Layer, batch, wrapped

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.timeline import COMPUTE, record

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "accumulation": {"accumulates": True},
    "checkpointing": {"checkpoints": True},
    "offload": {"cpu_offload": OFFLOAD},
    "mixed_precision": {"mixed_precision": BF16},
    "no_shard": {"sharding_strategy": NO_SHARD},
    "forward_prefetch": {"forward_prefetch": True},
}
CHOICES = [
    ("flat", "nothing"),
    *(("orig", name) for name in OPTIONS),
    *(("composable", name) for name in ("nothing", "accumulation", "checkpointing", "offload")),
]


def _in_training(front, place, accumulates=False, **options):
    """Returns a function that takes one step of a model; its batches are on the device already."""
    model = wrapped(front, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    batches = [batch(0, number).to(place) for number in range(2)]

    def step():
        if accumulates:
            with no_sync(model):
                model(batches[1]).square().sum().backward()
        model(batches[0]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(("front", "name"), CHOICES)
@on_devices
def test_steps_take_the_same_memory_and_the_host_never_waits(rank, world_size, device, front, name):
    """The peak is the same from the third step on, and nothing more is reserved."""
    place = place_of(device, rank)
    with over_the_group(device == "cuda"):  # gloo's threads let go of memory when they like
        step = _in_training(front, place, **OPTIONS[name])
        taken = [memory_of(place, step) for _ in range(6)]
    assert len(set(taken[2:])) == 1 and taken[2].peak > 0 == taken[2].kept, taken
    if name == "offload":  # the host steps, and waits for the gradients
        return
    with over_the_group():
        step = _in_training(front, place, **OPTIONS[name])
        for _ in range(2):  # in the first step ranks compare the model
            step()
        with no_waiting(place):
            for _ in range(2):
                step()


@only_cuda
@ranks(1, backend="nccl", timeout=240)
def test_waiting_is_noticed(rank, world_size):
    """Otherwise the test above would say nothing."""
    place = place_of("cuda", rank)
    value = torch.rand(3, device=place)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting(place):
        value.sum().item()


@either_front
@each_device
@ranks(1, backend=None, timeout=240)
def test_one_of_eight_ranks_that_send_nothing(rank, world_size, device, front):
    """Few units are whole at a time, and gathers are issued ahead of the units that need them."""
    place = place_of(device, rank)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    width, unit = 1024, 4 * 1024 * 1024
    blocks = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(6)]
    model = shard(front, nn.Sequential(*blocks).to(place), ModuleWrapPolicy({nn.Linear}))
    x = torch.rand(4, width, device=place)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    losses = []
    with record_events() as events:
        forward = memory_of(place, lambda: losses.append(model(x).sum()))
        backward = memory_of(place, lambda: losses.pop().backward())
    shards = 6 * unit // 8
    assert unit <= forward.peak <= 2.1 * unit, forward.peak / unit
    assert unit <= forward.kept + backward.peak <= 3.1 * unit + shards, backward.peak / unit
    kinds = [event.kind.value for event in events]
    assert kinds.count("unshard") >= 2 * 6 - 2 and kinds.count("reduce") == 6
    in_backward = [event for event in events if event.phase.value == "backward"]
    gathers = [event.unit for event in in_backward if event.kind.value == "unshard"]
    done = [event.unit for event in in_backward if event.kind.value == "post_backward"]
    order = [(event.kind.value, event.unit) for event in in_backward]
    ahead = [
        order.index(("unshard", later)) < order.index(("post_backward", earlier))
        for earlier, later in zip(done, done[1:])
        if later in gathers
    ]
    assert len(ahead) >= 3 and all(ahead), order


@on_devices
def test_offload_trains_what_does_not_fit(rank, world_size, device):
    """Parameters, gradients and Adam states take three times the memory that the process may allocate."""
    place = place_of(device, rank)
    blocks, width = (12, 1024) if device == "cuda" else (2, 32)
    model = Transformer(blocks=blocks, width=width)
    needed = 4 * sum(param.numel() * 4 for param in model.parameters()) / world_size
    if device == "cuda":
        assert torch.cuda.mem_get_info(place)[0] > needed, "another process uses this GPU"
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(needed / 3 / total, place)
    wrapped = shard(
        "orig",
        model,
        WRAPPINGS["block"](),
        cpu_offload=CPUOffload(offload_params=True),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=None if device == "cpu" else place,
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    batch, losses = tokens(rank, 0).to(place), []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(loss_of(wrapped, batch))
        losses[-1].backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
    assert {param.device.type for param in wrapped.parameters()} == {"cpu"}
    assert losses[-1].item() < losses[0].item()


@either_front
@on_devices
def test_units_on_a_device_that_is_not_current(rank, world_size, device, front):
    """Streams, buffers and pinned memory are the unit's, whichever device is current."""
    last = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.device_count() - 1)
    place_of(device, 0)
    if world_size > 1:
        pytest.skip("each rank has its own device")
    cases: tuple[dict[str, Any], ...] = ({}, {"cpu_offload": OFFLOAD})
    for options in cases:
        if front == "composable" and last.index:
            pytest.skip("a mesh is on the current device")
        extra: dict[str, Any] = {} if front == "composable" or device == "cpu" else {"device_id": last}
        model = wrapped(front, **options, **extra)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(0, step).to(last)).square().sum().backward()
            optimizer.step()
        assert model(torch.rand(2, 16, device=last)).device == last
    assert sum(isinstance(module, Layer) for module in model.modules()) == 3


_PARTS = 6
_SCRIPT = Path(__file__).parent / "sanitized.py"


def _names():
    """The programs of one rank: those of the script, which is not imported here since it sanitizes."""
    names = "import sanitized; print(*sanitized.NAMES)"
    return python("-c", names, folder=_SCRIPT.parent).out.split()


def test_programs_run_where_there_is_no_gpu():
    """The script is sound: what it reports on a GPU comes from the GPU."""
    if torch.cuda.is_available():
        pytest.skip("the sanitizer is on where there is a GPU")
    outcome = python(_SCRIPT, "trains-flat", "offloads-composable", "by_hand", "ordered", "race", code=2)
    assert outcome.out.count("race: order: ") == 2, outcome
    assert len(_names()) > 0.7 * len(PROGRAMS)


@only_cuda
def test_the_sanitizer_knows_the_events_of_torch():
    """Otherwise it would object to everything, or to nothing."""
    race = python(_SCRIPT, "race", code=2)
    assert race.out.count("race: order: ") == 2, race
    python(_SCRIPT, "ordered", code=0)


@only_cuda
@pytest.mark.parametrize("part", range(_PARTS))
def test_programs_under_the_sanitizer(part):
    python(_SCRIPT, *_names()[part::_PARTS], code=0)


class _Unit(nn.Module):
    """No gradient of it is half of all: where one is, memory is preferred to overlap."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        return x + self.layers(x).relu()


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@either_front
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
        trace = record(step, 2, {COMPUTE: None} | {name: lane._stream for name, lane in lanes.items()})
    assert len(trace.waits) == 2
    if device == "cuda":
        assert trace.busy(COMPUTE) > 0 and trace.beside("gather") > 0, trace
        if not offload:
            assert trace.beside("reduce") > 0 and trace.waits == [0, 0], trace
