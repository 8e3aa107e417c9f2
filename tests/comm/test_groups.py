"""Process groups that come and go, and ranks that end before they have used them."""

import copy
import gc
import multiprocessing.util
import os
import re
import signal
import time
import warnings
import weakref
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.accelerator import Simulation, simulations
from bed.patience import NEVER
from bed.scripts import on_ranks, python
from forks import run_forks
from fronts import HYBRID, assert_same_values, either_front, full_state, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap._building import build
from fsdp_wrap._comm import select as _communicators
from fsdp_wrap._comm.groups import Ranks, twin_of
from fsdp_wrap._comm.process_group import GroupCommunicator
from fsdp_wrap.distributed_state_dict import StateDictOptions, set_model_state_dict
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

DESTROYED = "^the process group of this wrapped module was destroyed; wrap it anew$"


def open_things() -> dict[str, int]:
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


@either_front
@ranks(2)
def test_groups_that_come_and_go_leave_nothing(rank, world_size, front, tmp_path):
    """Nor default groups, each of which has its store at the same port; torch's caches of meshes stay."""
    told = [dist.TCPStore("127.0.0.1", 0, 1, True).port if rank == 0 else 0]
    dist.broadcast_object_list(told)
    beside = dist.FileStore(str(tmp_path / "store"), world_size)
    dist.destroy_process_group()
    opened, within = [], []
    for turn in range(4):
        beside.set(f"{turn}/{rank}", "")  # the former store is gone on all ranks: nobody meets it on the port
        beside.wait([f"{turn}/{other}" for other in range(world_size)])
        store = dist.TCPStore("127.0.0.1", told[0], world_size, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        model = shard(front, net())
        step(model, torch.optim.AdamW(model.parameters(), foreach=True))
        for _ in range(8 if turn == 3 else 0):
            group = dist.new_group()
            step(on_group(front, group))
            dist.barrier()
            dist.destroy_process_group(group)
            del group
            gc.collect()
            within.append(open_things())
        dist.barrier()
        dist.destroy_process_group()
        del model, store
        gc.collect()
        opened.append(open_things())
    # A connection may close a moment after what it belonged to: there may be fewer.
    assert all(opened[-1][what] <= opened[1][what] for what in opened[1]), opened
    assert within[-1] == within[2]


def on_group(
    front: str, group: dist.ProcessGroup, module: nn.Module | None = None, **options: Any
) -> nn.Module:
    return shard(front, module or net(), process_group=group, **options)


def hybrid(front: str, module: nn.Module) -> nn.Module:
    return shard(front, module, device_mesh=init_device_mesh("cpu", (2, 2)), sharding_strategy=HYBRID)


@ranks(2)
def test_a_second_group_has_its_ranks_in_the_order_of_the_first(rank, world_size):
    """Reductions travel in it, and each rank keeps the part of its place in the first."""
    known = signature(dist.new_group).parameters  # older torch sorts the ranks of all groups
    in_order: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in known else {}
    group: Any = dist.new_group([1, 0], **in_order)
    assert twin_of(group) is not group
    assert dist.get_process_group_ranks(twin_of(group)) == dist.get_process_group_ranks(group)


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
    model = shard(front, net(), device_mesh=own)
    step(model)
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DESTROYED):
            step(model)


def end_early(rank: int, world_size: int, front: str, shared: str, when: str) -> str:
    """The last rank ends, as by an exception, while others have not begun their first forward."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    group = dist.new_group(timeout=timedelta(seconds=NEVER))
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


def test_a_rank_that_ends_before_the_first_forward_is_named_at_once():
    cases = [
        ("orig", "0", "before wrapping"),
        ("orig", "1", "after wrapping"),
        ("composable", "1", "before wrapping"),
        ("composable", "0", "after wrapping"),
    ]
    for case, ends in zip(cases, run_forks(end_early, cases, world_size=3)):
        for rank, end in enumerate(ends[:2]):
            headline, _, table = end.value.partition("Where the ranks stand:")
            assert "rank 2 has ended" in headline or "cannot complete without rank 2" in headline, case
            assert f"rank {rank}" not in headline, case
            assert "rank 2 (dead): in no unit yet" in table or "before wrapping" in case, case


def end_in_hybrid(rank: int, world_size: int, folder: Path, front: str, shared: str) -> None:
    """The last rank is killed in its second step."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    model = hybrid(front, net())
    step(model)
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        step(model)
    seen = folder / f"{front}2"
    if rank == 2:
        seen.with_suffix(".part").write_text(str(caught.value))
        seen.with_suffix(".part").rename(seen)
    while not seen.exists():  # so that rank 2 has nobody else to tell of
        time.sleep(0.01)
    os._exit(0)


def test_a_killed_rank_of_a_hybrid_mesh_is_named_as_all_ranks_count(tmp_path):
    """Rank 3 is the second of both its groups."""
    run_forks(end_in_hybrid, [(tmp_path, "orig", "0"), (tmp_path, "composable", "1")], world_size=4)
    for front in ("orig", "composable"):
        headline = (tmp_path / f"{front}2").read_text().partition("Where the ranks stand:")[0]
        assert "rank 3 has ended" in headline or "cannot complete without rank 3" in headline
        assert "rank 1" not in headline


def differ(rank: int, world_size: int, front: str, shared: str, how: str) -> str:
    """Trains ranks with other shapes, dtypes or ways to communicate; returns the error."""
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
        group = dist.new_group(timeout=timedelta(seconds=NEVER))
        model = on_group(front, group, module, **options)
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


def test_what_differs_between_ranks_is_named_on_all():
    cases = [("composable" if number % 2 else "orig", "1", how) for number, how in enumerate(CULPRITS)]
    cases += [("orig", "0", how) for how in ("shape", "torch")]
    for case, ends in zip(cases, run_forks(differ, cases, world_size=2)):
        for end in ends:
            assert end.value.startswith("ranks differ in "), case
            for other, culprit in enumerate(CULPRITS[case[2]]):
                assert f"rank {other} has {culprit}" in end.value


def unlike() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6))


def begun(front: str, how: str, rank: int) -> nn.Module:
    """Shards a model with this rank's own seed, or with one that ranks share."""
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
        told = [
            str(warning.message) for warning in caught if "began with other values" in str(warning.message)
        ]
        everywhere = gather_objects(told)
        assert all(len(lines) <= 1 for lines in everywhere), how
        assert any(everywhere) == (how in DIFFERENT), how
        for other, texts in enumerate(everywhere):
            for text in texts:
                culprit = (
                    rf"'{DIFFERENT[how]}\.weight' began with other values on rank {other} than on rank \d, "
                )
                assert re.search(culprit, text)
                assert "same seed" in text and "sync_module_states=True" in text


def test_samples_are_spread_over_a_parameter():
    whole, few = nn.Parameter(torch.arange(40.0).view(8, 5)), nn.Parameter(torch.tensor([3.0, -4.0]))
    assert build.sample([whole, few]).tolist() == [[0, 10, 20, 30], [3, -4, 0, 0]]


# Stand-ins for a process group, with a rank and a size: a module is wrapped as that rank would wrap it.


class Place:
    """One rank among some that are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))


def test_each_rank_alone_holds_the_part_that_it_would_hold_among_others():
    assert not dist.is_initialized()
    plain, places = three_layers(), [Place(rank, 3) for rank in range(3)]
    policy = ModuleWrapPolicy({nn.Linear})
    ranks = [
        FSDP(copy.deepcopy(plain), place, use_orig_params=True, auto_wrap_policy=policy)  # type: ignore[arg-type]
        for place in places
    ]
    for rank, wrapped in enumerate(ranks):
        assert (wrapped.rank, wrapped.world_size) == (rank, 3) and wrapped.process_group is places[rank]
        assert [type(module) for module in (wrapped[0], wrapped[2][0], wrapped[2][1])] == [FSDP] * 3
    for name in ("0", "2.0", "2.1"):
        layer, units = plain.get_submodule(name), [wrapper.module.get_submodule(name) for wrapper in ranks]
        for kind, whole in layer.named_parameters():
            pieces = [unit.get_parameter(f"_fsdp_wrapped_module.{kind}") for unit in units]
            assert torch.equal(torch.cat(pieces), whole.flatten()), (name, kind)  # type: ignore[arg-type]
        held = [sum(param.numel() for param in unit.parameters()) for unit in units]
        assert max(held) <= sum(map(torch.numel, layer.parameters())) / 3 + 4


def test_what_needs_the_others_is_refused_by_name():
    wrapped = FSDP(three_layers(), Place(1, 2))  # type: ignore[arg-type]
    for needs_them in (
        lambda: wrapped(torch.ones(1, 5)),
        lambda: wrapped.clip_grad_norm_(1.0),
        lambda: FSDP.summon_full_params(wrapped).__enter__(),
        wrapped.state_dict,
    ):
        with pytest.raises(RuntimeError, match="rank 1 of 2 with a Place as process_group"):
            needs_them()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_one_of_one_trains_as_a_plain_module(strategy):
    plain = three_layers().double()
    wrapped = FSDP(copy.deepcopy(plain), Place(0, 1), strategy, use_orig_params=True)  # type: ignore[arg-type]
    for model in (plain, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert_same_values(wrapped, plain)


def test_what_is_neither_a_group_nor_a_place_is_refused():
    for other in (3, object(), "gloo"):
        with pytest.raises(TypeError, match="rank.. and size"):
            FSDP(nn.Linear(2, 2), other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a process group"):
        FSDP(nn.Linear(2, 2))


HELD_TO_THE_END = """
import os, sys
import torch
import torch.distributed as dist
import fsdp_wrap

dist.init_process_group("gloo")
group = dist.group.WORLD  # as a mesh in a cache of torch's
processors = sorted(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):  # on one processor, gloo's threads come after the program
    os.sched_setaffinity(int(thread), {processors[dist.get_rank() % len(processors)]})
sys.setswitchinterval(1000)
for _ in range(20):
    dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_a_program_whose_group_outlives_its_destruction_ends_well(tmp_path):
    program = tmp_path / "held_to_the_end.py"
    program.write_text(HELD_TO_THE_END)
    python(*on_ranks(2, program))
