"""`checkpoint.InMemory`: what is left when a host is lost, who takes it from where, and how much it holds.

A host is who sees a folder: ranks play several hosts by naming several folders.
"""

import gc
import shutil
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fronts import full_state, shard
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint, InMemory
from fsdp_wrap.checkpoint._in_memory import MemorySave
from fsdp_wrap.wrap import ModuleWrapPolicy
from optim_states import assert_same, by_name
from resuming import Block, full_disk, net, other, train, trained
from state_nets import adamw, assert_close


def sharded(front: str, module: nn.Module, **options: Any) -> nn.Module:
    return shard(front, module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def stepped(front: str, rank: int, size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded(front, net())
    optimizer = adamw(model)
    train(model, optimizer, rank, size, range(2))
    return model, optimizer


def place(folder: Path, rank: int, per_host: int = 1) -> InMemory:
    return InMemory(folder / f"host{rank // per_host}")


def saved(folder: Path, rank: int, size: int, per_host: int = 1) -> tuple[Any, Any, InMemory]:
    """Returns a model and its optimizer, and the memory that has their second step."""
    model, optimizer = stepped("orig", rank, size)
    memory = place(folder, rank, per_host)
    checkpoint.save(memory, model, optimizer, step=2)
    return model, optimizer, memory


def lose(*hosts: Path) -> None:
    """Deletes these hosts' memory; all ranks go on once it is gone."""
    dist.barrier()
    if dist.get_rank() == 0:
        for host in hosts:
            shutil.rmtree(host)
    dist.barrier()


def as_after_two(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    """The model trains on as a plain one that was never interrupted: parameters and optimizer are right."""
    train(model, optimizer, rank, size, range(2, 4))
    assert_close(full_state(model), trained(4)[0].state_dict())


def resumes(
    memory: Any, front: str, rank: int, size: int, group: Any = None
) -> tuple[nn.Module, torch.optim.Optimizer, checkpoint.Loaded]:
    model = sharded(front, other(net()), **({"process_group": group} if group else {}))
    optimizer = adamw(model)
    loaded = checkpoint.load(memory, model, optimizer, process_group=group)
    assert loaded.step == 2
    as_after_two(model, optimizer, rank, size)
    return model, optimizer, loaded


@pytest.mark.parametrize(
    ("front", "per_host", "lost"), [("orig", 2, 0), ("composable", 2, 1), ("composable", 3, 0)]
)
@ranks(4)
def test_what_a_lost_host_held_comes_from_its_neighbour(rank, world_size, tmp_path, front, per_host, lost):
    """Also where hosts differ in size: with three ranks and one, the one takes what all three have."""
    model, optimizer = stepped(front, rank, world_size)
    memory = place(tmp_path, rank, per_host)
    pending = checkpoint.async_save(memory, model, optimizer, {"seen": 10 + rank}, step=2)
    train(model, optimizer, rank, world_size, range(2, 4))  # is not what was saved
    pending.result()
    before = torch.get_rng_state()
    lose(tmp_path / f"host{lost}")
    assert memory.latest() == 2
    again, of_again, loaded = resumes(memory, front, rank, world_size)
    assert loaded["seen"] == 10 + rank
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(by_name(of_again, again), by_name(optimizer, model))
    assert not (tmp_path / f"host{lost}" / "step_00000002").exists()  # a load writes nothing
    checkpoint.save(memory, again, of_again, step=4)
    lose(tmp_path / f"host{1 - lost}")
    assert memory.latest() == 4


@pytest.mark.parametrize("came_back", [1, 3])
@pytest.mark.filterwarnings("ignore")
@ranks(4)
def test_other_numbers_of_ranks_on_other_hosts_load(rank, world_size, tmp_path, came_back):
    """One of two hosts is lost; the ranks that load sit on the other one and on new hosts."""
    saved(tmp_path, rank, world_size, per_host=2)
    lose(tmp_path / "host0")
    survivors = dist.new_group(list(range(came_back)))
    if rank < came_back:
        memory = InMemory(tmp_path / ("host1" if rank == came_back - 1 else f"new{rank}"))
        resumes(memory, "orig", rank, came_back, survivors)


@ranks(3)
def test_each_step_is_held_twice_and_no_more(rank, world_size, tmp_path):
    """A host holds its ranks' shards and as many of its neighbour's, of one step, whatever came before."""
    model = shard("orig", nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 256)).sum().backward()
    optimizer.step()
    memory = place(tmp_path, rank)
    for step in (1, 2, 3):
        checkpoint.save(memory, model, optimizer, step=step)
        assert [path.name for path in memory.folder.glob("step_*")] == [f"step_{step:08d}"]
    held = sum(path.stat().st_size for path in memory.folder.rglob("*") if path.is_file())
    shard_bytes = 3 * 4 * 6 * 256 * 257 / world_size  # parameters and two averages
    assert 2 * shard_bytes < held < 2.2 * shard_bytes
    names = sorted(path.name for path in (memory.folder / "step_00000003").glob("*.distcp"))
    assert names == sorted(f"__{owner}_0.distcp" for owner in {rank, (rank - 1) % world_size})
    checkpoint.save(memory, model, optimizer, step=4, keep_last=2)
    assert len(list(memory.folder.glob("step_*"))) == 2
    dist.barrier()
    memory.clear()
    assert not memory.folder.exists()


@pytest.mark.parametrize("most", [1, 5])
@ranks(2)
def test_regular_saves_lose_no_more_steps_than_they_say(rank, world_size, tmp_path, most, monkeypatch):
    """Copies last longer than steps; a host may go after any step, and another one then has a newer one."""
    model, optimizer = stepped("orig", rank, world_size)
    memory = place(tmp_path, rank)
    write = MemorySave.write
    monkeypatch.setattr(MemorySave, "write", lambda save: (time.sleep(0.05), write(save))[1])  # type: ignore[func-returns-value]
    saves = checkpoint.RegularSaves(memory, model, optimizer, lose_at_most=most)
    newest = []
    for step in range(1, 4 * most + 1):
        newest.append(memory.latest() or 0)  # when the step before is over, and what follows it is not
        saves.after(step)
    saves.finish()
    lost = [step - last for step, last in enumerate(newest, 1)]
    assert max(lost) == most
    assert memory.latest() == 4 * most // saves.every * saves.every
    with pytest.raises(ValueError, match="lose_at_most must be at least 1 step, not 0"):
        checkpoint.RegularSaves(memory, model, optimizer, lose_at_most=0)


@ranks(3)
def test_an_older_step_that_is_whole_is_taken(rank, world_size, tmp_path):
    """A host went between the moments at which two others showed the newer step."""
    model, optimizer, memory = saved(tmp_path, rank, world_size)
    train(model, optimizer, rank, world_size, range(2, 4))
    checkpoint.save(memory, model, optimizer, step=4, keep_last=2)
    lose(tmp_path / "host0", tmp_path / "host1" / "step_00000004")
    assert memory.latest() == 2
    with pytest.raises(ValueError, match=r"no complete step 4 .* of step 4 no host has __0_0.distcp"):
        checkpoint.load(memory, model, optimizer, step=4)
    resumes(memory, "orig", rank, world_size)


@ranks(3)
def test_two_lost_neighbours_are_told(rank, world_size, tmp_path):
    model, optimizer = stepped("flat", rank, world_size)
    memory = place(tmp_path, rank)
    assert memory.latest() is None
    with pytest.raises(ValueError, match="no complete checkpoint in the memory .* no host holds any"):
        checkpoint.load(memory, model, optimizer)
    checkpoint.save(memory, model, optimizer, step=2)
    lose(tmp_path / "host1", tmp_path / "host2")
    assert memory.latest() is None
    with pytest.raises(ValueError, match="of step 2 no host has __1_0.distcp$"):
        checkpoint.load(memory, model, optimizer)
    as_after_two(model, optimizer, rank, world_size)  # nothing was changed


@ranks(2)
def test_damage_on_one_host_is_made_good_by_the_other(rank, world_size, tmp_path):
    model, optimizer, memory = saved(tmp_path, rank, world_size)
    for damaged in range(2):
        if rank == damaged:
            path = memory.folder / "step_00000002" / "__0_0.distcp"
            data = bytearray(path.read_bytes())
            data[700] ^= 1
            path.write_bytes(data)
        dist.barrier()
        if damaged == 0:
            resumes(memory, "orig", rank, world_size)
    told = "(?s)step 2 in the memory .*__0_0.distcp bytes .* are not as"
    with pytest.raises(DamagedCheckpoint, match=told):
        checkpoint.load(memory, model, optimizer)


@ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_what_was_there(rank, world_size, tmp_path):
    model, optimizer, memory = saved(tmp_path, rank, world_size)
    with pytest.raises(TypeError, match="rank 1: extra"):
        checkpoint.save(memory, model, optimizer, {"bad": (lambda: 0) if rank else 1}, step=3)
    with full_disk() if rank == 1 else nullcontext():
        full = r"saving step 3 in the memory of 2 hosts .*rank 1.*No space left"
        with pytest.raises(RuntimeError, match=full):
            checkpoint.save(memory, model, optimizer, step=3)
    gc.collect()  # nothing that a failure leaves behind may harm
    assert sorted(path.name for path in memory.folder.iterdir()) == ["step_00000002"]
    checkpoint.save(memory, model, optimizer)
    assert memory.latest() == 3


@ranks(1, 2)
def test_one_host_alone_keeps_what_it_has_and_warns(rank, world_size, tmp_path):
    model, optimizer = stepped("orig", rank, world_size)
    memory = InMemory(tmp_path / "here")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = checkpoint.save(memory, model, optimizer, step=2)
    told = [str(warning.message) for warning in caught if "memory of one host" in str(warning.message)]
    assert len(told) == (rank == 0)
    resumes(folder, "orig", rank, world_size)  # of one host it is a step folder like any
    with pytest.raises(RuntimeError, match="/proc/nowhere"):  # no folder can be made there
        InMemory("/proc/nowhere").latest()
