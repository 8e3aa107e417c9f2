"""Torch's pipeline schedules over stages that `fully_shard` has sharded, on (pipeline, data) meshes.

Gradients are compared with those of a plain model in float64 that sees the batches of all data ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import Traffic, count_collectives
from beside import check_each
from fronts import full
from fsdp_wrap import MixedPrecisionPolicy, ReplicateModule, compat, fully_shard
from fsdp_wrap._params import Where
from fsdp_wrap._runtime import units_in
from scenario import Scenario, pairwise

MICROBATCHES, ROWS, WIDTH, STEPS = 4, 2, 6, 3
UNITS = 3

PLACES = {"GPipe": 1, "1F1B": 1, "LoopedBFS": 2, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
"""How many stages a rank has, one every second place."""

IN_V = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose ranks have two stages, of which the last is the first's neighbour."""

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Those that compute gradients of inputs before those of parameters."""

VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
SCHEDULES, FAST = [*PLACES, *IN_V], [("1F1B", "kept"), ("ZBVZeroBubble", "kept")]


class Stage(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.checkpoints = nn.LayerNorm(WIDTH), checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.norm(x))))


def numbers_of(schedule: str, place: int) -> tuple[int, ...]:
    if schedule in IN_V:
        return (place, 3 - place)
    return tuple(place + 2 * stage for stage in range(PLACES[schedule]))


def shard(stage: Stage, mesh: DeviceMesh, way: Any = fully_shard, **options: Any) -> Any:
    for linear in (stage.first, stage.second):
        way(linear, mesh=mesh, **options)
    return way(stage, mesh=mesh, **options)


def batches(step: int, data_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (2, data_ranks, MICROBATCHES * ROWS, WIDTH)
    inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, targets


class Pipeline:
    """One rank's stages of a pipeline of two ranks, in its data-parallel group, beside the plain model."""

    def __init__(self, schedule: str, *data: int, checkpoints: bool = False) -> None:
        names = ("pipeline", "replicate", "shard") if len(data) == 2 else ("pipeline", "data")
        mesh = init_device_mesh("cpu", (2, *data), mesh_dim_names=names)
        self.name = schedule
        self.group, self.data = mesh.get_group("pipeline"), mesh[mesh.mesh_dim_names[1:]]
        self.numbers = numbers_of(schedule, mesh.get_coordinate()[0])
        self.total = 2 * len(self.numbers)
        torch.manual_seed(0)
        self.plain = [Stage(checkpoints).double() for _ in range(self.total)]
        self.own = {number: copy.deepcopy(self.plain[number]) for number in self.numbers}
        self.optimizers: list[torch.optim.Optimizer] = []

    def shard(self, way: Any = fully_shard, **options: Any) -> Pipeline:
        """Shards this rank's stages, and makes the optimizers."""
        for stage in self.own.values():
            shard(stage, self.data, way, **options)
        for stages in (self.plain, self.own.values()):
            params = [p for stage in stages for p in stage.parameters() if p.requires_grad]
            self.optimizers.append(torch.optim.SGD(params, lr=0.3, momentum=0.9))
        return self

    def schedule(self, of_stages: Any = None, **options: Any) -> Any:
        from torch.distributed import pipelining

        if self.name in IN_V and VERSION < (2, 12):  # whose ranks would tell themselves shapes, by messages
            example = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
            of_stages = {**(of_stages or {}), "input_args": (example,), "output_args": (example,)}
        stages = [
            pipelining.PipelineStage(
                stage, number, self.total, torch.device("cpu"), group=self.group, **(of_stages or {})
            )
            for number, stage in self.own.items()
        ]
        if self.name in IN_V and VERSION < (2, 12):  # gloo connects no rank with itself
            for stage in stages:
                stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        cls = getattr(pipelining, f"Schedule{self.name}")
        given = stages[0] if len(stages) == 1 else stages
        return cls(given, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss, **options)

    def step(self, schedule: Any, step: int, **options: Any) -> dict[str, Traffic]:
        """Runs one step of a schedule with this rank's data; returns the collectives."""
        inputs, targets = batches(step, self.data.size())
        own = dist.get_rank() % self.data.size()
        args = [inputs[own]] if 0 in self.numbers else []
        target = targets[own] if self.total - 1 in self.numbers else None
        with count_collectives() as counts:
            schedule.step(*args, target=target, **options)
        return counts

    def compare_and_update(self, step: int, atol: float = 1e-12, factor: int = 1) -> None:
        """Asserts that gradients are `factor` times the plain model's, and updates both."""
        for one, target in zip(*batches(step, self.data.size())):
            loss = nn.functional.mse_loss(nn.Sequential(*self.plain)(one), target)
            (factor * loss / self.data.size()).backward()
        for number, stage in self.own.items():
            for (name, param), other in zip(stage.named_parameters(), self.plain[number].parameters()):
                where = f"{name} of stage {number}"
                assert (param.grad is None) == (other.grad is None), where
                if param.grad is not None:
                    torch.testing.assert_close(full(param.grad), other.grad, rtol=0, atol=atol, msg=where)
        self.update()

    def train(self, schedule: Any, **options: Any) -> None:
        for step in range(STEPS):
            self.step(schedule, step)
            self.compare_and_update(step, **options)

    def begin(self, schedule: Any) -> None:
        """Lets the schedule infer shapes, by a step whose gradients are dropped."""
        self.step(schedule, 0)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def calls(counts: dict[str, Traffic]) -> tuple[int, ...]:
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    return tuple(counts.get(name, Traffic()).calls for name in names)


def is_sharded(pipeline: Pipeline) -> bool:
    units = [unit for stage in pipeline.own.values() for unit in units_in(stage).values()]
    return {unit.buffers.where for unit in units} == {Where.SHARDED}


UNITS_ARE = [
    *((schedule, "kept") for schedule in SCHEDULES),
    *(
        (schedule, "resharded")
        for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV")
    ),
    *((schedule, "replicated") for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
]


@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        units_are if units_are in FAST else pytest.param(*units_are, marks=pytest.mark.left_over(4))
        for units_are in UNITS_ARE
    ],
)
def test_units_are_gathered_seldom_and_reduced_once_in_a_step(rank, world_size, schedule, kind):
    with compat.install(fully_shard=True):
        from torch.distributed._composable.replicate_with_fsdp import replicate

        pipeline = Pipeline(schedule, 2, checkpoints=kind == "kept" and schedule in IN_V)
        if kind == "replicated":
            pipeline.shard(replicate)
            assert all(isinstance(stage, ReplicateModule) for stage in pipeline.own.values())
        else:
            pipeline.shard(torch_fsdp.fully_shard, reshard_after_forward=kind == "resharded")
        runs, several = pipeline.schedule(), len(pipeline.own) > 1
        units = UNITS * len(pipeline.own)
        most = {"kept": units if several else 1, "resharded": 14 if several else 5, "replicated": 0}[kind]
        for step in range(STEPS):
            counts = pipeline.step(runs, step)
            gathers, reductions = calls(counts)
            assert reductions == (0 if kind == "replicated" else units)
            if step:  # the first infers shapes by a step of its own; later ones gather units together
                assert gathers == most
                assert counts.get("all_reduce", Traffic()).calls <= units * (kind == "replicated")
            assert kind == "replicated" or is_sharded(pipeline)
            pipeline.compare_and_update(step)


SPACE: dict[str, Sequence[Any]] = {
    "schedule": SCHEDULES,
    "data": [(2,), (2, 1)],
    "reshard": [None, True, False],
    "together": [0, None],
    "precision": [None, torch.float32],
    "frozen": ["-", "first", "norm"],
    "checkpoints": [False, True],
    "scales": [True, False],
}


def check(scenario: Scenario) -> None:
    with compat.install(fully_shard=True):
        pipeline = Pipeline(scenario["schedule"], *scenario["data"], checkpoints=scenario["checkpoints"])
        for stage in (*pipeline.plain, *pipeline.own.values()):
            for name, param in stage.named_parameters():
                param.requires_grad_(scenario["frozen"] not in name)
        pipeline.shard(
            reshard_after_forward=scenario["reshard"],
            mp_policy=MixedPrecisionPolicy(scenario["precision"], output_dtype=torch.float64),
            travel_together_bytes=scenario["together"],
        )
        pipeline.train(
            pipeline.schedule(scale_grads=scenario["scales"]),
            atol=1e-12 if scenario["precision"] is None else 2e-5,
            factor=1 if scenario["scales"] else MICROBATCHES,
        )


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("part", range(3))
def test_training_equals_a_plain_model(rank, world_size, part):
    check_each(check, pairwise(SPACE, seed=22)[part::3])


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_evaluation_between_steps(rank, world_size, schedule):
    """It reduces nothing, computes with what an optimizer has written, and leaves nothing unsharded."""
    with compat.install(fully_shard=True):
        pipeline = Pipeline(schedule, 2).shard(reshard_after_forward=False)
        runs = pipeline.schedule()
        for step in range(STEPS):
            pipeline.step(runs, step)
            pipeline.compare_and_update(step)
            inputs, targets = batches(step, 2)
            first, last = 0 in pipeline.numbers, pipeline.total - 1 in pipeline.numbers
            with count_collectives() as counts, torch.no_grad():
                output = runs.eval(
                    *([inputs[rank % 2]] if first else []), target=targets[0] if last else None
                )
                expected = nn.Sequential(*pipeline.plain)(inputs[rank % 2])
            if last:
                torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
            assert calls(counts)[1] == 0
            assert is_sharded(pipeline)


@contextmanager
def ended_by_the_user(stage: Any) -> Iterator[None]:
    """No backward reduces: the end does."""
    stage.set_reshard_after_backward(False)
    stage.set_manual_backward_finalization(True)
    stage.set_requires_gradient_sync(False)
    yield
    stage.set_requires_gradient_sync(True)
    stage.set_reshard_after_backward(True)
    stage.finalize_backward()


@pytest.mark.left_over(4)
@ranks(4)
@pytest.mark.parametrize(
    ("schedule", "reshard"), [(schedule, number % 2 == 0) for number, schedule in enumerate(SCHEDULES)]
)
def test_stages_that_torch_does_not_know(rank, world_size, schedule, reshard):
    """Each microbatch reduces. What splits the backward must be told to compute all gradients at once."""
    pipeline = Pipeline(schedule, 2).shard(reshard_after_forward=reshard)
    runs = pipeline.schedule({"dw_builder": lambda: lambda: None} if schedule in SPLIT else None)
    pipeline.begin(runs)
    pipeline.train(runs)


@ranks(4)
@pytest.mark.parametrize(
    "schedule",
    [
        "1F1B",
        *(pytest.param(schedule, marks=pytest.mark.slow) for schedule in [*PLACES][:4] if schedule != "1F1B"),
    ],
)
def test_the_user_ends_the_backwards_of_stages_that_torch_does_not_know(rank, world_size, schedule):
    pipeline = Pipeline(schedule, 2).shard(reshard_after_forward=False)
    runs = pipeline.schedule(scale_grads=False)
    pipeline.begin(runs)
    for step in range(STEPS):
        with count_collectives() as counts:
            with ExitStack() as stack:
                for stage in pipeline.own.values():
                    stack.enter_context(ended_by_the_user(stage))
                pipeline.step(runs, step)
        assert calls(counts) == (len(pipeline.own), UNITS * len(pipeline.own))
        for param in (p for stage in pipeline.own.values() for p in stage.parameters()):
            param.grad /= MICROBATCHES
        pipeline.compare_and_update(step)


@ranks(1)
def test_a_stage_of_sharded_layers_is_refused_where_the_backward_is_split(rank, world_size):
    with compat.install(fully_shard=True):
        from torch.distributed.pipelining import PipelineStage

        module = nn.Sequential(fully_shard(nn.Linear(4, 4)))
        stage = PipelineStage(module, 0, 1, torch.device("cpu"))
        with pytest.raises(
            RuntimeError, match=r"stage 0 \(Sequential\) on rank 0 .* apply fully_shard to it"
        ):
            stage.backward_maybe_with_nosync("input", {})
