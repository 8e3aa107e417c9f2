"""Plans: beside what the same steps take where they run, and what cannot be planned."""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import sys
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from bed import run_ranks
from bed.paths import ROOT
from fronts import FRONTS, HYBRID, either_front, shard
from fsdp_wrap import CPUOffload, EventKind, Machine, MixedPrecision, Plan, record_events
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._core import format_bytes
from fsdp_wrap._runtime import units_in
from fsdp_wrap.tools import step_of
from fsdp_wrap.tools.memory import tell_of_memory
from fsdp_wrap.wrap import ModuleWrapPolicy
from tools.measured import rest_and_peak

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import planned
from benchmarks.meters import Travelling

RANKS = 16  # beyond 8 gloo is asked for its own collectives, as the group that carries nothing is
WIDTH = 48
MACHINE = Machine(
    name="small",
    flops={"float32": 1e11},
    memory_bandwidth=1e10,
    bandwidth_within=1e9,
    bandwidth_between=1e8,
    ranks_per_host=8,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Checkpointed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, layer=Layer, tied=False) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100, bias=False)
        self.layers = nn.Sequential(*(layer() for _ in range(3)))
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens):
        return self.head(self.layers(self.token(tokens)))


def made(front, model=Model, device="cpu", freeze="", **options):
    """A setup for `plan`: a model by its class, sharded by layer, and a step of AdamW."""
    whole = model()
    for name, param in whole.named_parameters():
        param.requires_grad_(not freeze or freeze not in name)
    sharded = shard(front, whole.to(device), ModuleWrapPolicy({Layer, Checkpointed}), **options)
    trainable = [param for param in sharded.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, foreach=False)

    def step():  # after which gradients stay
        optimizer.zero_grad()
        sharded(torch.randint(100, (4, 32), device=device)).logsumexp(-1).sum().backward()
        optimizer.step()

    return sharded, optimizer, step


def make_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


@pytest.fixture
def group():
    """A process group of many ranks that carries nothing, on which steps run with numbers."""
    make_group()
    yield
    dist.destroy_process_group()
    gc.collect()


@contextmanager
def without_group():
    dist.destroy_process_group()
    yield
    make_group()


@contextmanager
def alone():
    """Runs a test in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_measured(setup):
    """A plan whose bytes are those of steps that run in the group; and what one of these sends."""
    rest, peak, step = rest_and_peak(setup)
    with Travelling() as travelling, record_events() as events:
        step()
    with without_group():
        plan = fsdp_wrap.plan(setup, RANKS)
    assert plan.rest_bytes == pytest.approx(rest, rel=0.005)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.02)
    return plan, travelling, events


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {"freeze": "layers.1"},
    "partly frozen": {"freeze": "linear.weight"},
    "tied": {"model": partial(Model, tied=True)},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "checkpointed": {"model": partial(Model, Checkpointed)},
}
PAIRS = [("orig", option) for option in OPTIONS] + [
    ("flat", "tied"),
    ("composable", "partly frozen"),
    ("composable", "bf16"),
    ("composable", "checkpointed"),
]


@pytest.mark.parametrize(("front", "option"), PAIRS)
def test_bytes_are_those_of_steps_that_run(front, option, group):
    plan, travelling, events = as_measured(partial(made, front, **OPTIONS[option]))
    assert plan.payload_bytes["all_gather"] == travelling.nbytes["gathers"]
    assert plan.payload_bytes["reduce_scatter"] == travelling.nbytes["reduce-scatters"]
    for unit in plan.units:
        gathers = sum(event.kind is EventKind.UNSHARD and event.unit == unit.name for event in events)
        reductions = sum(event.kind is EventKind.REDUCE and event.unit == unit.name for event in events)
        assert (unit.gathers, unit.reductions) == (gathers, reductions)


@either_front
def test_every_byte_has_a_kind(front):
    plan = fsdp_wrap.plan(partial(made, front), RANKS)
    whole = sum(param.numel() for param in Model().parameters())
    assert plan.parameters == whole
    assert sum(plan.rest_by_kind.values()) == plan.rest_bytes
    assert sum(plan.peak_by_kind.values()) == plan.peak_bytes
    assert max(moment.nbytes for moment in plan.moments) == plan.peak_bytes
    shards = sum(unit.shard_bytes for unit in plan.units)
    assert plan.rest_by_kind["shards"] == pytest.approx(shards, rel=0.01)
    assert plan.rest_by_kind["gradients"] == pytest.approx(shards, rel=0.02)
    assert 4 * whole / RANKS <= shards <= 4 * whole / RANKS * 1.1
    counts = 4 * 16  # of steps, at most, one for each parameter
    assert 2 * shards * 0.98 <= plan.rest_by_kind["optimizer state"] <= 2 * shards + counts
    assert plan.peak_by_kind["gathered"] >= max(unit.gathered_bytes for unit in plan.units)
    assert plan.peak_at in {moment.place for moment in plan.moments}


def test_plans_of_few_and_of_many_ranks():
    plan, alone_ = (fsdp_wrap.plan(partial(made, "orig"), count) for count in (4, 1))
    assert plan.wire_bytes["all_gather"] == plan.payload_bytes["all_gather"] * 3 // 4
    received = sum(sum(unit.wire_bytes.values()) for unit in plan.units)
    assert received == pytest.approx(sum(plan.wire_bytes.values()), abs=len(plan.units))
    assert sum(alone_.wire_bytes.values()) == 0 and alone_.rest_bytes > plan.rest_bytes
    first, last = (fsdp_wrap.plan(partial(made, "orig"), 16384, rank=rank) for rank in (0, 16383))
    assert first.ranks == 16384 and last.rank == 16383
    assert first.payload_bytes == last.payload_bytes
    assert first.rest_by_kind["shards"] < 4 * first.parameters / 1000


def hybrid(front):
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return made(front, device="cuda", device_mesh=mesh, sharding_strategy=HYBRID)


@either_front
def test_replicas_are_summed_over_the_slower_links(front, monkeypatch):
    """Under torchrun as well, where the device need not be there either."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    figures = {"latency_within": 0.0, "latency_between": 0.0, "bandwidth_between": 1e6}
    at_once = Machine.from_dict({**MACHINE.to_dict(), **figures})
    whole, halves = (
        fsdp_wrap.plan(setup, RANKS, device="cuda", machine=at_once)
        for setup in (partial(made, front, device="cuda"), partial(hybrid, front))
    )
    assert halves.rest_by_kind["shards"] == pytest.approx(2 * whole.rest_by_kind["shards"], rel=0.06)
    assert halves.collectives["all_reduce"] == halves.collectives["reduce_scatter"]
    received = halves.payload_bytes["all_reduce"]  # twice half of it
    assert halves.wire_bytes["all_reduce"] == received
    assert halves.communication_seconds < whole.communication_seconds
    assert os.environ["LOCAL_RANK"] == "3"


@either_front
def test_a_device_that_is_not_there(front):
    options = {"cpu_offload": CPUOffload(True)}
    offloaded = fsdp_wrap.plan(partial(made, front, device="cuda", **options), RANKS, device="cuda")
    there = fsdp_wrap.plan(partial(made, front, device="cuda"), RANKS, device="cuda")
    shards = sum(unit.shard_bytes for unit in there.units)
    assert there.device == "cuda" and there.host.offloaded < shards
    assert offloaded.host.offloaded >= 4 * shards and offloaded.host.pinned >= shards
    assert offloaded.rest_bytes < there.rest_bytes / 4
    for kind, nbytes in there.wire_bytes.items():  # but for how small units are aligned that travel together
        assert offloaded.wire_bytes[kind] == pytest.approx(nbytes, rel=0.02)


def cut_twice():
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "tensor"))
    layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3)]
    model = nn.Sequential(*layers).to("cuda")
    for layer in model:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fsdp_wrap.fully_shard(layer, mesh=mesh["data"])
    fsdp_wrap.fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(8, 64, device="cuda")).sum())


def test_tensor_parallelism():
    plan = fsdp_wrap.plan(cut_twice, 8, device="cuda")
    held = (64 * 256 * 2 + 256) // 2 + 64  # numbers of a layer on its two ranks, each
    assert plan.rest_by_kind["shards"] == pytest.approx(3 * 4 * held / 4, rel=0.01)
    # Of outputs, and of the gradients of all inputs but the first.
    assert plan.collectives["all_reduce"] == 3 + 2
    assert plan.wire_bytes["all_reduce"] == 5 * 8 * 64 * 4


@either_front
def test_accumulation_reduces_once(front, group):
    def setup():
        model, optimizer, _ = made(front)

        def loss():
            return model(torch.randint(100, (4, 32))).logsumexp(-1).sum()

        return model, optimizer, step_of(model, optimizer, loss, accumulation=3)

    plan, travelling, _ = as_measured(setup)
    assert plan.collectives["reduce_scatter"] == travelling.calls["reduce-scatters"]
    assert {unit.reductions for unit in plan.units} == {1}


# A rank without a batch.


def helped(front, batches, device="cpu"):
    """A setup for `plan` whose ranks have different numbers of batches: rank 0, and all others."""
    torch.manual_seed(0)
    model, optimizer, _ = made(front, device=device)

    def step():
        optimizer.zero_grad()
        with fsdp_wrap.uneven(model):
            for _ in range(batches[min(dist.get_rank(), 1)]):
                model(torch.randint(100, (4, 32), device=device)).logsumexp(-1).sum().backward()
        optimizer.step()

    return model, optimizer, step


def measured_while_helped(rank, world_size, front, batches):
    """Bytes at rest and at the peak of a third step."""

    def setup():
        model, optimizer, step = helped(front, batches)
        return model, optimizer, lambda: (step(), gc.collect())

    with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="0"), planned.letting_go():
        return rest_and_peak(setup)[:2]


@pytest.mark.parametrize(("front", "batches"), [("orig", (2, 0)), ("composable", (2, 0)), ("flat", (2, 1))])
def test_bytes_of_a_rank_that_helps_are_those_of_one_over_gloo(front, batches):
    _, (rest, peak) = run_ranks(2, measured_while_helped, front, batches)
    plan = fsdp_wrap.plan(partial(helped, front, batches), 2, rank=1, helps=0)
    assert plan.rest_bytes == pytest.approx(rest, rel=0.005)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.02)


@either_front
def test_a_rank_that_helps_holds_two_units(front):
    """Beside its shards and gradients; `fully_shard` copies a unit out of what has been gathered."""
    setup = partial(helped, front, (2, 0), "cuda")
    leader = fsdp_wrap.plan(setup, 4, device="cuda")
    helper = fsdp_wrap.plan(setup, 4, device="cuda", rank=3, helps=0)
    units = sorted(unit.gathered_bytes for unit in helper.units)[-2:]
    copied = units[-1] if front == "composable" else 0
    assert helper.rest_by_kind["gradients"] == pytest.approx(helper.rest_by_kind["shards"], rel=0.02)
    assert helper.peak_bytes <= 1.03 * (helper.rest_bytes + sum(units) + copied) < leader.peak_bytes / 3
    assert (helper.flops, str(helper.peak_at)) == (0, "helping other ranks")
    assert {moment.place.phase for moment in helper.moments} == {"step", "helping other ranks", "optimizer"}
    assert leader.flops > 0 and helper.collectives["reduce_scatter"] == 2 * len(helper.units)


def test_a_rank_that_helps_has_its_own_batches_first():
    one, both, alone_ = (
        fsdp_wrap.plan(partial(helped, "orig", batches), 4, rank=3, helps=0)
        for batches in ((2, 1), (1, 2), (2, 2))
    )
    assert 2 * one.flops == both.flops == alone_.flops
    assert "helping other ranks" in {moment.place.phase for moment in one.moments}
    for plan in (both, alone_):  # the former leads the others in its second batch
        assert "helping other ranks" not in {moment.place.phase for moment in plan.moments}
    assert one.payload_bytes == both.payload_bytes


def test_a_rank_helps_no_more_often_than_the_other_one_calls():
    def setup():
        model, optimizer, _ = made("orig")

        def step():
            for _ in range(1 + dist.get_rank()):
                with fsdp_wrap.uneven(model):
                    pass

        return model, optimizer, step

    with pytest.raises(ValueError, match=r"rank 1 enters uneven\(\) more often in a plan than the rank"):
        fsdp_wrap.plan(setup, 2, rank=1, helps=0)
    assert fsdp_wrap.plan(setup, 2).collectives == {} and not dist.is_initialized()


def test_a_model_without_values():
    def setup():
        with torch.device("meta"):
            model: nn.Module = Model()
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True, device_id=0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(100, (4, 32), device="cuda")
        return model, optimizer, step_of(model, optimizer, lambda: model(tokens).sum())

    plan = fsdp_wrap.plan(setup, RANKS, device="cuda")
    units = [*plan.units]
    assert plan.setup_peak_bytes < 4 * plan.parameters
    assert plan.setup_peak_bytes >= max(unit.gathered_bytes for unit in units)


def test_a_plan_goes_to_json_and_back_and_is_read_by_people(tmp_path):
    plan = fsdp_wrap.plan(partial(made, "orig", device="cuda"), RANKS, device="cuda", machine=MACHINE)
    assert Plan.from_json(plan.to_json(tmp_path / "plan.json")) == plan
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == plan
    with pytest.raises(ValueError, match=r"not what Plan.to_json\(\) writes"):
        Plan.from_json("{}")
    page = str(plan)
    assert max(map(len, page.splitlines())) <= 80
    assert all(text in page for text in ("at rest", "peak", "layers.0", "all_gather", "Predicted on small"))
    plan.plot(tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_padding_of_aligned_shards_is_shown(group):
    """As much as `repr` tells, where shards are aligned."""
    aligned = partial(made, "orig", shard_alignment=700)
    shown = repr(aligned()[0])
    with without_group():
        padded, usual = fsdp_wrap.plan(aligned, RANKS), fsdp_wrap.plan(partial(made, "orig"), RANKS)
    told = [int(figure) for figure in re.findall(r"aligned to [^)]*, (\d+) of padding", shown)]
    assert [unit.padding_bytes for unit in padded.units] == [4 * padding for padding in told]
    assert len(told) == 4 and all(told)
    assert not any(unit.padding_bytes for unit in usual.units) and "padding" not in str(usual)
    assert f"take {format_bytes(4 * sum(told))} of padding in all ranks together" in str(padded)
    assert str(padded).endswith(f": {format_bytes(4 * max(told))}")


def test_predictions_follow_the_machine():
    setup = partial(made, "orig", device="cuda")
    plan = partial(fsdp_wrap.plan, setup, RANKS, device="cuda")
    figures = MACHINE.to_dict()
    base = plan(machine=MACHINE)
    slow = plan(machine=Machine.from_dict({**figures, "bandwidth_between": 1e6}))
    instant = plan(machine=Machine.from_dict({**figures, "operator_seconds": 0.0, "memory_bandwidth": 1e18}))
    assert base.predicted_seconds == pytest.approx(base.compute_seconds + base.exposed_seconds)
    assert slow.compute_seconds == base.compute_seconds and slow.exposed_seconds > base.exposed_seconds
    # By hand: a gather of all, between two hosts of eight ranks, of which each has eight links.
    wire = sum(base.wire_bytes.values())
    number = sum(base.collectives.values())
    expected = number * MACHINE.latency_between + wire * (1 / 2) / (15 / 16) / 8 / 1e6
    assert slow.communication_seconds == pytest.approx(expected, rel=0.01)
    # 6 FLOPs for each weight of a matrix and token, of 4 x 32 tokens; the embedding has none.
    matrices = 3 * WIDTH * WIDTH + 100 * WIDTH
    assert base.flops == 6 * matrices * 4 * 32
    assert instant.compute_seconds == pytest.approx(base.flops / 1e11, rel=1e-3)
    assert plan().predicted_seconds is None
    # The device computes nothing while it communicates.
    alternating = plan(machine=Machine.from_dict({**figures, "overlap": 0.0}))
    assert alternating.exposed_seconds == pytest.approx(alternating.communication_seconds)
    assert base.exposed_seconds < base.communication_seconds
    assert alternating.predicted_seconds == pytest.approx(
        alternating.compute_seconds + alternating.communication_seconds
    )


# What leaves no trace, and what is refused.


def test_models_from_before_go_on_working_and_groups_can_be_made():
    torch.manual_seed(0)
    before, x = Model(), torch.randint(100, (2, 8))
    expected = copy.deepcopy(before)(x)
    state = torch.get_rng_state()
    for front in FRONTS:
        fsdp_wrap.plan(partial(made, front), 4)
        assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before(x), expected)
    with alone():
        model, _, step = made("composable")
        step()
        assert all(param.grad is not None and not param.is_meta for param in model.parameters())
        assert units_in(model)


def with_step(change):
    def setup():
        model, optimizer, _ = made("orig")
        return model, optimizer, partial(change, model)

    return setup


def numbers(model, read):
    read(model(torch.randint(100, (4, 32))).sum())


def test_what_cannot_be_followed_is_refused():
    for read in (
        torch.Tensor.item,
        float,
        bool,
        torch.Tensor.tolist,
        lambda loss: loss.detach().numpy(),
        torch.nonzero,
        lambda loss: loss.view(1)[loss.view(1) > 0],
    ):
        with pytest.raises(fsdp_wrap.PlanningError, match="asks for numbers, and a plan has none"):
            fsdp_wrap.plan(with_step(partial(numbers, read=read)), 4)
        assert not dist.is_initialized()
    there = Model()
    with pytest.raises(fsdp_wrap.PlanningError, match=r"made before plan\(\)"):
        fsdp_wrap.plan(partial(made, "orig", model=lambda: there), 4)
    assert torch.isfinite(there.head.weight).all()  # and is as it was


def test_wrong_uses_are_refused():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    returned: Any
    arguments: Any
    for returned, text in [
        (model, r"must return \(model, optimizer, step\), and returned Linear"),
        ((model, optimizer), "returned a tuple of 2"),
        ((1, optimizer, print), "must be an nn.Module, not int"),
        ((model, model, print), "must be a torch.optim.Optimizer, not Linear"),
        ((model, optimizer, 1), "the step .* must be a function, not int"),
    ]:
        with pytest.raises(TypeError, match=text):
            fsdp_wrap.plan(partial(lambda given: given, returned), 8)
    for arguments, error, text in [
        ({"setup": None}, TypeError, "must be a function"),
        ({"setup": lambda: (model, optimizer, print)}, ValueError, "no module of the model .* is sharded"),
        ({"ranks": 0}, ValueError, "from 1 to 16384"),
        ({"ranks": 16385}, ValueError, "from 1 to 16384"),
        ({"rank": 8}, ValueError, "from 0 to 7"),
        ({"helps": 0}, ValueError, "a rank from 0 to 7 other than 0, not 0"),
        ({"helps": 8}, ValueError, "a rank from 0 to 7 other than 0, not 8"),
        ({"device": "tpu"}, ValueError, "device must be one of"),
    ]:
        with pytest.raises(error, match=text):
            fsdp_wrap.plan(**{"setup": partial(made, "orig"), **arguments})
    with pytest.raises(ValueError, match="memory_bandwidth must be positive"):
        Machine.from_dict({**MACHINE.to_dict(), "memory_bandwidth": 0})
    with pytest.raises(ValueError, match="overlap must be from 0 to 1, not 1.5"):
        Machine.from_dict({**MACHINE.to_dict(), "overlap": 1.5})
    with pytest.raises(ValueError, match="unexpected keyword argument 'wings'"):
        Machine.from_dict({**MACHINE.to_dict(), "wings": 2})


# Beside ranks over gloo.


@pytest.mark.slow
def test_bytes_are_those_of_ranks_over_gloo():
    """With each option in one form; figures of all ways are in the page."""
    of_wrapper = ["original, in place", "original, offload", "flat, checkpoint around"]
    ways = [*of_wrapper, *(f"fully_shard, {way}" for way in ("bf16", "offload", "checkpoint inside"))]
    worst, wrong = planned.judge(planned.compare("small", ways, 2))
    assert worst <= planned.MOST_OFF and not wrong


def test_the_page_shows_the_figures_and_they_are_near_enough():
    rows = json.loads(planned.FIGURES.read_text())
    worst, wrong = planned.judge(rows)
    assert len(rows) == 2 * len(planned.MODELS) * len(planned.WAYS), "at 2 and at 4 ranks"
    assert worst <= planned.MOST_OFF and not wrong
    assert planned.PAGE.read_text() == planned.written_page(rows)

    way = "fully_shard, bf16"
    plan = fsdp_wrap.plan(partial(planned.setup, planned.CASES["small"], planned.WAYS[way]), 2)
    figures = plan.rest_bytes, plan.peak_bytes, sum(plan.wire_bytes.values())
    row = rows[f"small, {way}, 2 ranks"]
    assert figures == pytest.approx(
        [row[f"planned {what}"] for what in ("rest", "peak", "received")], rel=0.01
    )


def test_an_error_for_lack_of_memory_tells_of_the_plan(group):
    model, _, _ = made("orig")
    units = [*units_in(model).values()]
    with pytest.raises(ValueError, match="this process has one already"):
        fsdp_wrap.plan(partial(made, "orig"), 4)
    assert dist.get_world_size() == RANKS
    with without_group():
        plan = fsdp_wrap.plan(partial(made, "orig"), 4)
    error = MemoryError("can't allocate memory")
    tell_of_memory(error, units)
    assert f"The plan of them for rank 0 of {plan.ranks} on cpu" in str(error)


def test_a_plan_beside_a_timeline():
    with alone():
        model, _, step = made("orig")
        with fsdp_wrap.timeline(model) as recorded:
            step()
            step()
    compared = fsdp_wrap.plan(partial(made, "orig"), 1, machine=MACHINE).compare(recorded)
    assert compared.steps == 2 and compared.measured_seconds > 0
    for unit in compared.units:
        assert unit.measured_bytes == pytest.approx(unit.planned_bytes, rel=0.02)
        assert unit.planned_bytes > 0 and unit.measured_compute > 0
    assert str(compared).count("\n") == 1 + len(compared.units)
    assert max(map(len, str(compared).splitlines())) <= 80
    with pytest.raises(ValueError, match="plan is of rank 1, and the timeline has records of ranks 0"):
        fsdp_wrap.plan(partial(made, "orig"), 2, rank=1).compare(recorded)
