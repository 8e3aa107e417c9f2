"""Process groups that come and go, and ranks that end before they have used them."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import re
import signal
import time
import warnings
import weakref
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks, run_isolated
from bed.accelerator import Simulation, simulations
from fronts import full_state, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap._comm import select as _communicators
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.objects import all_gather_object, broadcast_object
from fsdp_wrap._comm.process_group import GroupCommunicator
from fsdp_wrap.distributed_state_dict import StateDictOptions, set_model_state_dict
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

either_front = pytest.mark.parametrize("front", ["orig", "composable"])
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


@either_front
@ranks(2)
def test_default_groups_that_come_and_go_leave_nothing(rank, world_size, front):
    """The port is free for the next one; torch's caches of what happened to `DTensor`s stay."""
    port, beside = a_free_port(rank), store_beside(rank)
    dist.destroy_process_group()
    found = []
    for turn in range(4):
        beside.set(f"{turn}/{rank}", "")  # the former store is gone on all ranks: nobody meets it on the port
        beside.wait([f"{turn}/{other}" for other in range(world_size)])
        start(rank, world_size, port)
        model = shard(front, net())
        step(model, torch.optim.AdamW(model.parameters(), foreach=True))
        dist.barrier()
        dist.destroy_process_group()
        del model
        gc.collect()
        found.append(open_things())
    # A connection may close a moment after what it belonged to: there may be fewer.
    assert all(found[-1][what] <= found[1][what] for what in found[1]), found


def a_free_port(rank: int) -> int:
    store = dist.TCPStore("127.0.0.1", 0, 1, True) if rank == 0 else None
    told = [store.port if store is not None else 0]
    dist.broadcast_object_list(told)
    del store
    return int(told[0])


def store_beside(rank: int) -> dist.TCPStore:
    """A store of the test's own."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True) if rank == 0 else None
    told = [server.port if server is not None else 0]
    dist.broadcast_object_list(told)
    return server or dist.TCPStore("127.0.0.1", told[0], None, False)


@either_front
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
    if front == "orig":
        return FSDP(net(), process_group=group, use_orig_params=True)
    return fully_shard(net(), mesh=dist.DeviceMesh.from_group(group, "cpu"))


def hybrid(front: str, module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2))
    if front == "composable":
        return fully_shard(module, mesh=mesh)
    strategy = ShardingStrategy.HYBRID_SHARD
    return FSDP(module, device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True)


@ranks(2)
def test_objects_travel_without_a_warning(rank, world_size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all_gather_object(rank, dist.group.WORLD) == [0, 1]
        assert broadcast_object(rank, dist.group.WORLD) == 0


@ranks(2)
def test_what_nobody_waits_for_does_not_hold_the_group(rank, world_size):
    """On an accelerator it holds its buffers; a group that outlives its end can abort the process."""
    with simulations(), Simulation().use():
        group = dist.new_group()
        communicator = GroupCommunicator(Ranks(group, rank, world_size), torch.device("cpu"))
        pending = communicator.all_gather([torch.zeros(4)], lambda: None)
        reference = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert reference() is None
        del pending


@pytest.mark.parametrize(("front", "mesh"), [("orig", "own"), ("composable", "own"), ("orig", "default")])
@ranks(2)
def test_a_model_of_a_destroyed_group_is_refused(rank, world_size, front, mesh):
    """Also where a mesh of the user's keeps the group alive."""
    own = init_device_mesh("cpu", (world_size,)) if mesh == "own" else None
    model = fully_shard(net(), mesh=own) if front == "composable" else FSDP(net(), device_mesh=own)
    step(model)
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DESTROYED):
            step(model)


# Ranks that end early.

LIMIT = 600.0
"""Seconds, by which nothing ends: a rank that has ended is noticed long before."""


def end_early(rank: int, world_size: int, front: str, shared: str, when: str) -> str:
    """The last rank ends, as by an exception, while others have not begun their first forward."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    model = None if when == "before wrapping" and rank == world_size - 1 else on_group(front, group)
    dist.barrier()
    if rank == world_size - 1:
        multiprocessing.util._exit_function()
        os._exit(1)
    time.sleep(rank / 2)
    assert model is not None
    with pytest.raises(RuntimeError) as caught:
        step(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("front", "shared", "when"),
    [
        ("orig", "0", "before wrapping"),
        ("orig", "1", "after wrapping"),
        ("composable", "1", "before wrapping"),
        pytest.param("composable", "0", "after wrapping", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_before_the_first_forward_is_named_at_once(front, shared, when):
    outcomes = run_isolated(end_early, front, shared, when, world_size=3)
    for rank, outcome in enumerate(outcomes[:2]):
        assert outcome.kind == "passed", outcome
        headline, _, table = outcome.value.partition("Where the ranks stand:")
        assert "rank 2 has ended" in headline or "cannot complete without rank 2" in headline
        assert f"rank {rank}" not in headline
        assert "rank 2 (dead): in no unit yet" in table or when == "before wrapping"


def end_in_hybrid(rank: int, world_size: int, folder: str, front: str, shared: str) -> None:
    """The last rank is killed in its second step."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    model = hybrid(front, net())
    step(model)
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        step(model)
    (Path(folder) / f"{rank}").write_text(str(caught.value))
    time.sleep(1 if rank else 0)  # so that others have nobody else to tell of
    os._exit(0)


@pytest.mark.parametrize(("front", "shared"), [("orig", "0"), ("composable", "1")])
def test_a_killed_rank_of_a_hybrid_mesh_is_named_as_all_ranks_count(front, shared, tmp_path):
    """Rank 3 is the second of both its groups."""
    run_isolated(end_in_hybrid, str(tmp_path), front, shared, world_size=4)
    headline = (tmp_path / "2").read_text().partition("Where the ranks stand:")[0]
    assert "rank 3 has ended" in headline or "cannot complete without rank 3" in headline
    assert "rank 1" not in headline


# What ranks must have alike.


def differ(rank: int, world_size: int, front: str, shared: str, how: str) -> str:
    """Shapes whose padding makes parts equal, other dtypes of one size, and other ways to communicate."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    with pytest.raises(RuntimeError) as caught:
        if how in ("FSDP_WRAP_SHARED_MEMORY", "FSDP_WRAP_GLOO"):
            os.environ[how] = CULPRITS[how][rank].partition("=")[2]
        if how == "library":
            _communicators.__version__ = CULPRITS[how][rank].partition(" ")[2]
        if how == "torch":
            torch.__version__ = f"{CULPRITS[how][rank].partition(' ')[2]}.{rank}+cpu"  # type: ignore[assignment]
        rows = 4 - rank if how == "shape" else 4
        dtype = torch.float16 if how == "dtype" and rank else torch.bfloat16 if how == "dtype" else None
        module = nn.Sequential(nn.Linear(8, rows, bias=False, dtype=dtype), nn.Flatten())
        options: dict[str, Any] = {"shared_memory": bool(rank)} if how.startswith("shared_memory") else {}
        group = dist.new_group(timeout=timedelta(seconds=LIMIT))
        if front == "composable":
            mesh = dist.DeviceMesh.from_group(group, "cpu")
            model: nn.Module = fully_shard(module, mesh=mesh, **options)
        else:
            model = FSDP(module, process_group=group, use_orig_params=True, **options)
        if how == "shared_memory in a state dict":
            full_state(model)
        for _ in range(3):
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
    return str(caught.value)


CULPRITS = {
    "shape": ["'0.weight' of shape (4, 8), torch.float32", "'0.weight' of shape (3, 8), torch.float32"],
    "dtype": ["'0.weight' of shape (4, 8), torch.bfloat16", "'0.weight' of shape (4, 8), torch.float16"],
    "FSDP_WRAP_SHARED_MEMORY": ["FSDP_WRAP_SHARED_MEMORY=0", "FSDP_WRAP_SHARED_MEMORY=1"],
    "library": ["fsdp_wrap 0.1.0", "fsdp_wrap 0.2.0"],
    "torch": ["torch 2.13", "torch 2.14"],
    "shared_memory": ["shared_memory=False", "shared_memory=True"],
    "shared_memory in a state dict": ["shared_memory=False", "shared_memory=True"],
    "FSDP_WRAP_GLOO": ["FSDP_WRAP_GLOO=plain", "FSDP_WRAP_GLOO=exchange"],
}


DIFFERENCES = [
    *(("composable" if number % 2 else "orig", "1", how) for number, how in enumerate(CULPRITS)),
    *(("orig", "0", how) for how in ("shape", "torch")),
]


@pytest.mark.parametrize(("front", "shared", "how"), DIFFERENCES)
def test_what_differs_between_ranks_is_named_on_all(front, shared, how):
    for outcome in run_isolated(differ, front, shared, how, world_size=2):
        assert outcome.kind == "passed", outcome
        assert outcome.value.startswith("ranks differ in ")
        for other, culprit in enumerate(CULPRITS[how]):
            assert f"rank {other} has {culprit}" in outcome.value


@either_front
@ranks(2)
def test_ranks_may_call_the_parameters_of_a_unit_otherwise(rank, world_size, front):
    """As where each leaves out another of several modules of one shape."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    expected = torch.ones(1, 4)
    for layer in layers:
        expected = layer(expected)
    names = ["first", "second"] if rank == 0 else ["one", "two"]
    model = shard(front, nn.Sequential(OrderedDict(zip(names, layers))))
    torch.testing.assert_close(model(torch.ones(1, 4)), expected)


# Initial values.


def unlike() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6))


def begun(front: str, how: str, rank: int) -> nn.Module:
    """Shards a model of a seed of this rank's own, or of another."""
    torch.manual_seed({"same seed": 0, "hybrid": rank // 2}.get(how, rank))
    with torch.device("meta" if how == "meta" else "cpu"):
        module = unlike()
    if how == "hybrid":
        return hybrid(front, module)
    options: dict[str, dict[str, Any]] = {
        "synced": {"sync_module_states": True},
        "not sharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    }
    model = shard(front, module, ModuleWrapPolicy({nn.Linear}), **options.get(how, {}))
    if how == "meta":
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.detach().fill_(rank)
    elif how == "loaded":
        torch.manual_seed(5)
        full = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, unlike().state_dict(), options=full)
    elif how == "edited":
        with FSDP.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
    return model


DIFFERENT = {"seeds": "1", "not sharded": "2", "hybrid": "1"}
"""Differences that are reported, with the module whose parameter is named."""


WAYS_TO_BEGIN = {
    "flat": ["seeds"],
    "orig": ["seeds", "hybrid", "same seed", "loaded", "not sharded", "synced", "edited"],
    "composable": ["seeds", "hybrid", "loaded", "meta"],
}


@pytest.mark.parametrize("front", WAYS_TO_BEGIN)
@ranks(4)
def test_ranks_that_begin_with_other_values_are_told_once(rank, world_size, front):
    for how in WAYS_TO_BEGIN[front]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = begun(front, how, rank)
            for _ in range(3):
                model(torch.ones(2, 6)).sum().backward()
        told = [str(each.message) for each in caught if "began with other values" in str(each.message)]
        everywhere = gather_objects(told)
        assert all(len(each) <= 1 for each in everywhere), how
        assert any(everywhere) == (how in DIFFERENT), how
        for other, texts in enumerate(everywhere):
            for text in texts:
                culprit = (
                    rf"'{DIFFERENT[how]}\.weight' began with other values on rank {other} than on rank \d, "
                )
                assert re.search(culprit, text)
                assert "same seed" in text and "sync_module_states=True" in text
