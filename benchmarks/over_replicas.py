"""One state for all copies against whole copies and full sharding: bytes at rest and received, and times.

python -m benchmarks.over_replicas
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import Table, run_ranks
from benchmarks.wire import travelled
from fsdp_wrap import MixedPrecisionPolicy, fully_shard

RANKS, COPIES = 4, 2
WIDTH, LAYERS, ROWS = 1024, 6, 16
STEPS, WARM = 15, 3
WAYS = ("full sharding", "copies", "one state for all copies")
LINKS = {"gloo": False, "memory of the host": True}


def measure(shared_memory: bool) -> Table:
    """Returns a row for each way; called on every rank. Steps of the ways take turns."""
    trained, rows = {}, {}
    for way in WAYS:
        before = _live_bytes()
        trained[way] = subject = _Trained(way, shared_memory)
        for _ in range(WARM):
            subject.step()
        rows[way] = {"at rest MB": (_live_bytes() - before) / 1e6}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(STEPS):
        for way, subject in trained.items():
            dist.barrier()
            begin = time.perf_counter()
            subject.step()
            dist.barrier()
            seconds[way].append(time.perf_counter() - begin)
    for way, subject in trained.items():
        if not shared_memory:
            rows[way]["received MB"] = travelled(subject.step)
        pairs = zip(seconds[way], seconds["copies"])
        rows[way]["step / copies"] = statistics.median(one / other for one, other in pairs)
    return rows


class _Trained:
    def __init__(self, way: str, shared_memory: bool) -> None:
        names = ("replicate", "shard") if way != "full sharding" else ("shard",)
        shape = (COPIES, RANKS // COPIES) if len(names) == 2 else (RANKS,)
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "state_over_replicas": way == WAYS[-1],
            "shared_memory": shared_memory,
        }
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for part in (*self.model, self.model):
            fully_shard(part, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)

    def step(self) -> None:
        self.model(torch.ones(ROWS, WIDTH)).float().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _live_bytes() -> int:
    """Returns the bytes of live tensors, once gloo's threads have let go of sent ones."""
    dist.barrier()
    time.sleep(0.2)
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    storages = [tensor.untyped_storage() for tensor in tensors if type(tensor) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main() -> None:
    """Prints a table for each link."""
    print(
        f"{LAYERS} matrices of {WIDTH} x {WIDTH}, bfloat16, AdamW; {COPIES} copies of {RANKS // COPIES} ranks"
    )
    for link, shared_memory in LINKS.items():
        print(f"\nover {link}")
        for way, row in run_ranks(measure, RANKS, shared_memory).items():
            print(f"  {way:26}", *(f"{name} {value:8.2f}" for name, value in row.items()), sep="  ")


if __name__ == "__main__":
    main()
