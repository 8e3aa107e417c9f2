"""Collectives of a step of ours and of torch's: tensor parallelism, experts, float8 and pipelines.

python -m benchmarks.counts --cases "tensor parallelism,experts"
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_ranks
from benchmarks.meshes import OVER_MESHES, RANKS, parallelize
from benchmarks.meters import Travelling
from benchmarks.models import Block, ExpertsBlock, LinearBlock, SplitTransformerBlock
from fsdp_wrap import compat

UNITS, WIDTH, LENGTH, BATCH = 4, 64, 16, 2
MICROBATCHES = 4
THEIRS = {"fsdp_wrap": "fsdp1", "fully_shard": "fsdp2", "fully_shard_keep": "fsdp2_keep"}
"""Torch's counterpart of each of our implementations."""
PLAIN_GLOO = {"FSDP_WRAP_SHARED_MEMORY": "0", "FSDP_WRAP_GLOO": "plain"}
"""Ours then calls the collectives of a process group, and nothing of its own, as over any other backend."""

Step = Callable[[], object]


def _units(make: Callable[[], Block]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(UNITS)))


def _training(model: nn.Module, x: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def _tensor_parallel(name: str) -> Step:
    """Makes a step of transformer blocks, cut over two ranks and sharded over the other dimension."""
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(_units(lambda: SplitTransformerBlock(WIDTH, 4)), mesh["tp"])
    return _training(OVER_MESHES[name](model, mesh["dp"]), torch.randn(BATCH, LENGTH, WIDTH))


def _experts(name: str) -> Step:
    """Makes a step of layers whose experts are spread over two ranks, and sharded over their ranks."""
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("edp", "ep"))
    model = _units(lambda: ExpertsBlock(WIDTH, RANKS))
    experts = {_spread(block, matrix, mesh["ep"]) for block in model.children() for matrix in ("up", "down")}
    info = torch_common.FSDPMeshInfo(mesh=mesh["edp"], shard_mesh_dim=0)
    told = torch_common.ShardPlacementResult(placement=None, mesh_info=info)
    given = {
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "shard_placement_fn": lambda param: told if param in experts else None,
    }
    return _training(_by_function(name, model, **given), torch.randn(BATCH, LENGTH, WIDTH))


def _spread(block: nn.Module, name: str, mesh: DeviceMesh) -> nn.Parameter:
    """Gives each rank of a mesh some of the experts."""
    part = nn.Parameter(distribute_tensor(getattr(block, name).detach(), mesh, [Shard(0)]))
    setattr(block, name, part)
    return part


def _by_function(name: str, model: nn.Module, **options: Any) -> nn.Module:
    """Applies our function or torch's to all blocks and the model."""
    from fsdp_wrap import fully_shard

    apply: Callable[..., Any] = fully_shard if name.startswith("fully_shard") else torch_fsdp.fully_shard
    for unit in (*(child for child in model.children() if isinstance(child, Block)), model):
        apply(unit, **options)
    return model


def _float8(name: str) -> Step:
    """Makes a step of linear layers whose weights torchao gathers as float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = convert_to_float8_training(_units(lambda: LinearBlock(WIDTH)), config=config)
    return _training(
        _by_function(name, model, mesh=init_device_mesh("cpu", (RANKS,))), torch.randn(BATCH, WIDTH)
    )


def _pipeline(name: str) -> Step:
    """Makes a step of one of two pipeline stages, by torch's 1F1B; its schedule knows ours by `compat`."""
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp"))
    stage = _units(lambda: LinearBlock(WIDTH))
    _by_function(name, stage, mesh=mesh["dp"], reshard_after_forward=not name.endswith("_keep"))
    place, device = mesh.get_local_rank("pp"), torch.device("cpu")
    staged = pipelining.PipelineStage(stage, place, 2, device, group=mesh.get_group("pp"))
    schedule = pipelining.Schedule1F1B(staged, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.randn(MICROBATCHES * BATCH, WIDTH)

    def step() -> None:
        stage.zero_grad()
        schedule.step(*([x] if place == 0 else []), target=x if place else None)

    return step


_EACH, _FUNCTIONS = ("fsdp_wrap", "fully_shard"), ("fully_shard",)
CASES: dict[str, tuple[Callable[[str], Step], tuple[str, ...]]] = {
    "tensor parallelism": (_tensor_parallel, _EACH),
    "experts": (_experts, _FUNCTIONS),
    "float8": (_float8, _FUNCTIONS),
    "pipeline": (_pipeline, ("fully_shard", "fully_shard_keep")),
}
"""A maker of a step by case, and the implementations of ours that can take it."""
NEEDS = {"float8": "torchao"}


def measure(case: str) -> Table:
    """Counts collectives in the third step of each implementation; called on every rank."""
    make, ours = CASES[case]
    return {name: _counted(case, make, name) for own in ours for name in (THEIRS[own], own)}


def _counted(case: str, make: Callable[[str], Step], name: str) -> dict[str, float]:
    ours = name in THEIRS
    known: AbstractContextManager[Any] = nullcontext()
    if ours and case == "pipeline":
        known = compat.install(fully_shard=True)
    with patch.dict(os.environ, PLAIN_GLOO), known:
        step = make(name)
        for _ in range(2):  # the first compares units, and pipelines infer shapes
            step()
        with Travelling() as travelling:
            step()
    dist.barrier()
    row: dict[str, float] = {}
    for kind in travelling.calls:
        row[kind] = travelling.calls[kind]
        row[f"{kind}, KB"] = travelling.nbytes[kind] / 1e3
    return row


def ask(settings: Settings) -> Figures:
    """Returns a table a case; cases whose package is missing are left out."""
    there = [case for case in CASES if importlib.util.find_spec(NEEDS.get(case, "torch"))]
    if not hasattr(torch_common, "ShardPlacementResult"):  # before torch 2.12
        there.remove("experts")
    tables = {case: run_ranks(measure, RANKS, case) for case in settings.cases_of(there)}
    return {case: _with_zeros(table) for case, table in tables.items()}


def _with_zeros(table: Table) -> Table:
    """Sorts the columns, and adds zeros for kinds that only other implementations issue."""
    columns = sorted({column for row in table.values() for column in row})
    return {name: {column: row.get(column, 0) for column in columns} for name, row in table.items()}


QUESTION = Question(
    "counts",
    "Collectives of a step",
    f"""\
How many collectives the first of {RANKS} ranks issues in a forward and backward, and kilobytes of what they
gather, reduce or send; ours beside torch's. Those of the models are among them, which both issue alike:
activations in tensor parallelism, tokens that go to experts, and a pipeline's messages. The third step
counts. Ours calls the process group's own collectives here, as over any other backend than gloo.
{UNITS} units of width {WIDTH} and the root, which has no parameters. `tensor parallelism`: blocks of a
transformer on a (dp=2, tp=2) mesh. `experts`: layers with {RANKS} experts, two a rank, which have a mesh of
their own beside that of all other parameters. `float8`: linear layers that torchao's float8 training gathers
as float8, emulated, on {RANKS} ranks; left out where torchao is not installed. `pipeline`: torch's 1F1B with
{MICROBATCHES} microbatches of stages on a (pp=2, dp=2) mesh, `_keep` without resharding after forward.""",
    ask,
    chart="gathers",
    cases=[*CASES],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
