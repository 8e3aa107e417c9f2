"""Ways to accumulate gradients on a hybrid mesh: what waits for the last backward, and traffic of a step.

python -m benchmarks.accumulation
"""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_ranks
from benchmarks.meters import Travelling
from fsdp_wrap import FullyShardedDataParallel, ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy

RANKS, COPIES = 4, 2
BACKWARDS = 4
WIDTH, LAYERS = 512, 8
CASE = f"{COPIES} copies of {RANKS // COPIES} ranks"
WAYS = ("all reductions each time", "no_sync(reduce_within_copy=True)", "no_sync()")


def _made() -> FullyShardedDataParallel:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return FullyShardedDataParallel(
        layers,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (COPIES, dist.get_world_size() // COPIES)),
        use_orig_params=True,
        shared_memory=False,
    )


def _context(model: FullyShardedDataParallel, way: str) -> AbstractContextManager[None]:
    if way == WAYS[0]:
        return nullcontext()
    return model.no_sync(reduce_within_copy=way == WAYS[1])


def measure() -> Table:
    """Returns a row for each way; called on every rank."""
    return {way: _of(way) for way in WAYS}


def _of(way: str) -> dict[str, float]:
    model = _made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> None:
        model(torch.ones(1, WIDTH)).sum().backward()

    def accumulate() -> None:
        with _context(model, way):
            for _ in range(BACKWARDS - 1):
                backward()

    for step in range(2):  # the first step compares units, and the last is measured
        optimizer.zero_grad()
        with Travelling() as travelling:
            before = _live_bytes()
            accumulate()
            waits = _live_bytes() - before
            backward()
        if step == 0:
            optimizer.step()
    full = sum(param.numel() * param.element_size() for param in model.parameters()) * RANKS / COPIES
    return {
        "waits, of all gradients": waits / full,
        "gathers": travelling.calls["gathers"],
        "reduce-scatters": travelling.calls["reduce-scatters"],
        "all-reduces": travelling.calls["all-reduces"],
        "reduced in the copy MB": travelling.nbytes["reduce-scatters"] / 1e6,
        "summed over copies MB": travelling.nbytes["all-reduces"] / 1e6,
    }


def _live_bytes() -> int:
    """Returns the bytes of live tensors, once gloo's threads have let go of sent ones."""
    dist.barrier()
    time.sleep(0.2)
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def ask(settings: Settings) -> Figures:
    """Returns one table."""
    return {case: run_ranks(measure, RANKS) for case in settings.cases_of([CASE])}


QUESTION = Question(
    "accumulation",
    "Accumulation on a hybrid mesh",
    f"""\
A step of {BACKWARDS} backwards, {LAYERS} layers of width {WIDTH} in fp32, each a unit, HYBRID_SHARD: {COPIES}
copies of {RANKS // COPIES} ranks over gloo. Of a rank: `waits`, live tensors before the last backward that
were not there before the first, relative to the full gradients; collectives of a step; megabytes that enter
reduce-scatters within the copy, and all-reduces over the copies: between hosts where a copy is a host.""",
    ask,
    chart="waits, of all gradients",
    cases=[CASE],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
