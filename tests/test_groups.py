"""Process groups that come and go, and ranks that end before they have used them."""

from __future__ import annotations

import gc
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks, run_isolated
from fronts import each_front, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard

DESTROYED = "^the process group of this wrapped module was destroyed; wrap it anew$"


def open_things() -> dict[str, int]:
    """Descriptors, maps that have to do with this library, and threads of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": sum("fsdp_wrap" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 200)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 3))


# Groups that come and go.


def start(rank: int, world_size: int, port: int, seconds: float = 30) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=seconds)),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


@each_front
@ranks(2)
def test_default_groups_that_come_and_go_leave_nothing(rank, world_size, front):
    """The port is free for the next one; torch's caches of what happened to `DTensor`s stay."""
    port = a_free_port(rank)
    dist.destroy_process_group()
    found = []
    for _ in range(4):
        start(rank, world_size, port)
        model = shard(front, net())
        step(model, torch.optim.AdamW(model.parameters(), foreach=True))
        dist.barrier()
        dist.destroy_process_group()
        del model
        gc.collect()
        found.append(open_things())
    assert found[-1] == found[1]


def a_free_port(rank: int) -> int:
    store = dist.TCPStore("127.0.0.1", 0, 1, True) if rank == 0 else None
    told = [store.port if store is not None else 0]
    dist.broadcast_object_list(told)
    del store
    return int(told[0])


@each_front
@ranks(2)
def test_groups_that_come_and_go_leave_nothing(rank, world_size, front):
    found = []
    for _ in range(12):
        group = dist.new_group()
        model = on_group(front, group)
        step(model)
        dist.barrier()
        dist.destroy_process_group(group)
        del model, group
        gc.collect()
        found.append(open_things())
    assert found[-1] == found[2]


def on_group(front: str, group: dist.ProcessGroup) -> nn.Module:
    if front != "composable":
        return FSDP(net(), process_group=group, use_orig_params=front == "orig")
    return fully_shard(net(), mesh=dist.DeviceMesh.from_group(group, "cpu"))


@pytest.mark.parametrize("mesh", ["own", "default"])
@each_front
@ranks(2)
def test_a_model_of_a_destroyed_group_is_refused(rank, world_size, front, mesh):
    """Also where a mesh of the user's keeps the group alive."""
    own = init_device_mesh("cpu", (world_size,)) if mesh == "own" else None
    if front == "composable":
        model = fully_shard(net(), mesh=own)
    else:
        model = FSDP(net(), device_mesh=own, use_orig_params=front == "orig")
    step(model)
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DESTROYED):
            step(model)


# Ranks that end early.

LIMIT = 60.0


def end_early(rank: int, world_size: int, folder: str, front: str, when: str) -> None:
    """The last rank ends by an exception; the first one has not begun then, and the others wait."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    if rank == world_size - 1:
        model = on_group(front, group) if when == "after wrapping" else None
        time.sleep(0.5)
        del model
        raise SystemExit("as an exception would")
    if rank == 0:
        time.sleep(1.0)
    model = on_group(front, group)
    begin = time.monotonic()
    try:
        step(model)
    except RuntimeError as error:
        report = {"error": str(error), "took": time.monotonic() - begin}
        (Path(folder) / f"{rank}").write_text(json.dumps(report))
    os._exit(0)
