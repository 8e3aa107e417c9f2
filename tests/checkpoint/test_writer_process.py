"""Saves that a process writes: the same files, whatever training does meanwhile; and its end."""

import copy
import gc
import os
import resource
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bed import ranks, run_isolated
from bed.patience import until
from fronts import shard
from fsdp_wrap import checkpoint, fully_shard
from fsdp_wrap._writer_process import process
from fsdp_wrap.checkpoint._manifest import Manifest, read_metadata
from resuming import names_in, net, train
from state_nets import adamw, assert_equal

small_states_too = mock.patch.object(process, "LEAST_BYTES", 0)


class Shapes(nn.Module):
    """Tensors of many kinds: one is transposed, one has gaps, one has no element, some have other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.none = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(1 << 18, dtype=torch.bfloat16))
        self.register_buffer("count", torch.arange(5))
        self.register_buffer("whole", torch.randn(3, 4))
        self.register_buffer("view", self.whole[1])


def writer() -> int:
    (running,) = process._running
    return running._process.pid


def trained(front: str, rank: int, world_size: int, steps: int) -> tuple[Any, Any]:
    model = shard(front, net())
    optimizer = adamw(model)
    train(model, optimizer, rank, world_size, range(steps))
    return model, optimizer


def content(folder: Path) -> Any:
    """Returns the checksums of all items of a step folder, without its index, which has an identity."""
    files = Manifest.read(folder).files
    return {name: [crc for *_, crc in pieces] for name, pieces in files.items() if name != ".metadata"}


@pytest.mark.parametrize("front", ["flat", "orig", "composable"])
@ranks(2)
@small_states_too
def test_training_goes_on_and_the_files_are_those_of_a_save(rank, world_size, front, tmp_path):
    model, optimizer = trained(front, rank, world_size, steps=2)
    extra = {"seen": rank}
    waited = checkpoint.save(tmp_path / "waited", model, optimizer, extra)
    expected = copy.deepcopy(model.state_dict())
    pids = set()
    for number in (1, 2):  # the second in the memory of the first
        pending = checkpoint.async_save(tmp_path / "aside", model, optimizer, extra)
        if number == 2:
            train(model, optimizer, rank, world_size, range(2, 4))
        assert content(pending.result()) == content(waited)
        pids.add(writer())
    assert len(pids) == 1
    dist.barrier()
    assert checkpoint.load(tmp_path / "aside", model, optimizer)["seen"] == rank
    assert_equal(model.state_dict(), expected)


def index_of(folder: Path) -> Any:
    """Returns the index of a step folder, without its identity."""
    metadata = read_metadata(folder)
    return metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data


def counted_plans() -> Any:
    """Returns a context that yields a mock, which is called once for each plan that this rank makes."""
    make = DefaultSavePlanner.create_local_plan
    return mock.patch.object(DefaultSavePlanner, "create_local_plan", autospec=True, side_effect=make)


@pytest.mark.parametrize("front", ["flat", "orig", "composable"])
@ranks(2)
@small_states_too
def test_a_save_like_the_one_before_goes_by_its_plan(rank, world_size, front, tmp_path):
    model, optimizer = trained(front, rank, world_size, steps=1)
    extra: dict[str, Any] = {"seen": 0}

    def planned_save() -> int:
        """Saves beside training and compares the files with those of a save; returns how often it planned."""
        waited = checkpoint.save(tmp_path / "waited", model, optimizer, extra)
        with counted_plans() as plans:
            pending = checkpoint.async_save(tmp_path / "aside", model, optimizer, extra)
            train(model, optimizer, rank, world_size, range(1, 2))
            folder = pending.result()
        assert content(folder) == content(waited) and index_of(folder) == index_of(waited)
        dist.barrier()
        return int(plans.call_count)

    assert planned_save() == 1
    extra["seen"] = "a longer value"  # of which the pickle has another length
    optimizer.param_groups[0]["lr"] = 0.25
    assert planned_save() == planned_save() == 0
    if rank == 1:
        extra["more"] = rank
    assert planned_save() == 1  # on all ranks, though one's state alone has changed
    assert planned_save() == 0
    extra.pop("more", None)
    assert planned_save() == 1
    inner = getattr(model, "module", model)
    inner.register_buffer("late", torch.ones(3))
    assert planned_save() == 1
    inner.late = torch.full((3,), 2.0, dtype=torch.float64)
    assert planned_save() == 1  # of another dtype
    inner.late = torch.full((3,), 3.0, dtype=torch.float64)  # another tensor that is like it
    assert planned_save() == 0
    full = mock.patch.object(process._running[0], "ask", side_effect=OSError("no room"))
    with full if rank == 1 else nullcontext(), pytest.raises(RuntimeError, match="rank 1: OSError: no room"):
        checkpoint.async_save(tmp_path / "aside", model, optimizer, extra).result()
    assert planned_save() == 1


@small_states_too
def test_a_plan_is_for_one_model_and_goes_with_it(tmp_path):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    expected = copy.deepcopy(other.state_dict())
    with counted_plans() as plans:
        checkpoint.async_save(tmp_path, model).result()
        checkpoint.async_save(tmp_path, other).result()
        assert plans.call_count == 2
    checkpoint.load(tmp_path, model)
    assert_equal(model.state_dict(), expected)
    (running,) = process._running
    assert running._last is not None
    del other
    gc.collect()
    assert running._last is None


@small_states_too
def test_a_plan_is_for_its_ranks_and_for_one_save(tmp_path):
    model = nn.Linear(3, 3)
    checkpoint.async_save(tmp_path, model).result()
    (running,) = process._running
    last: Any = running._last
    ranks, pickled = last.plan
    assert running.take_plan(last.state, [*ranks, 7]) is None  # and not kept any more
    assert running.take_plan(last.state, ranks) is None
    running.keep_plan(last.state, ranks, pickled)
    assert running.take_plan(last.state, ranks) == pickled and running.take_plan(last.state, ranks) is None


class Foreign(torch.Tensor):
    """A class of which a save knows nothing."""


@small_states_too
def test_tensors_of_unknown_classes_are_planned_each_time(tmp_path):
    model = nn.Linear(3, 3)
    model.register_buffer("foreign", torch.zeros(2).as_subclass(Foreign))
    with counted_plans() as plans:
        checkpoint.async_save(tmp_path, model).result()
        model.foreign.fill_(7)
        checkpoint.async_save(tmp_path, model).result()
        assert plans.call_count == 2
    model.foreign.zero_()
    with torch.serialization.safe_globals([Foreign]):
        checkpoint.load(tmp_path, model)
    assert model.foreign.tolist() == [7, 7]


@small_states_too
def test_it_is_nice_in_the_session_of_its_rank_and_no_interrupt_reaches_it(tmp_path):
    checkpoint.async_save(tmp_path, nn.Linear(3, 3)).result()
    assert os.getpriority(os.PRIO_PROCESS, writer()) == 19
    assert os.getsid(writer()) == os.getsid(0) and os.getpgid(writer()) != os.getpgid(0)


@small_states_too
def test_tensors_of_all_kinds_lie_in_the_memory_and_grow_it(tmp_path):
    torch.manual_seed(0)
    model = Shapes()
    expected = copy.deepcopy(model.state_dict())
    pending = checkpoint.async_save(tmp_path, model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    assert content(pending.result()) != content(checkpoint.save(tmp_path / "zeros", model))
    checkpoint.load(tmp_path, model)
    assert_equal(model.state_dict(), expected)

    model.more = nn.Parameter(torch.randn(3 << 21))  # more than there was room for
    expected = copy.deepcopy(model.state_dict())
    checkpoint.async_save(tmp_path, model).result()
    model.more.data.zero_()
    checkpoint.load(tmp_path, model)
    assert_equal(model.state_dict(), expected)


@mock.patch.object(process, "LEAST_BYTES", 1 << 20)
def test_a_small_state_needs_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_running", [])
    checkpoint.async_save(tmp_path, nn.Linear(300, 300)).result()
    assert not process._running
    checkpoint.async_save(tmp_path, nn.Linear(300, 1000)).result()
    (running,) = process._running
    checkpoint.async_save(tmp_path, nn.Linear(3, 3)).result()  # since there is one
    assert process._running == [running] and running._last is not None
    monkeypatch.setattr(process, "_running", [])
    monkeypatch.setattr(process, "LEAST_TENSORS", 2)
    monkeypatch.setattr(process, "WriterProcess", lambda: running)  # another one would take seconds to begin
    checkpoint.async_save(tmp_path, nn.Linear(3, 3)).result()  # many small ones
    assert process._running == [running]


@mock.patch.object(process, "LEAST_BYTES", 1 << 20)
def sharded_model_is_as_large_as_its_part(rank: int, world_size: int, folder: Path) -> bool:
    model = fully_shard(nn.Linear(600, 600, bias=False))  # 1.4 MB, of which each rank has a half
    checkpoint.async_save(folder, model).result()
    return bool(process._running)


def test_what_counts_is_the_part_of_a_rank(tmp_path):
    ends = run_isolated(sharded_model_is_as_large_as_its_part, tmp_path, world_size=2)
    assert [end.value for end in ends] == [False, False], ends


@small_states_too
def test_a_fork_has_a_process_of_its_own(tmp_path):
    model = nn.Linear(3, 3)
    checkpoint.async_save(tmp_path, model).result()
    pid = os.fork()
    if not pid:
        before = writer()
        done = checkpoint.async_save(tmp_path / "fork", model).result().name == "step_00000001"
        process._running[0].end()
        os._exit(0 if done and writer() != before else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert checkpoint.async_save(tmp_path, model).result().name == "step_00000002"


@small_states_too
def test_a_file_that_may_not_grow_says_so_and_the_process_goes_on(tmp_path):
    model = nn.Linear(300, 300)
    checkpoint.async_save(tmp_path, model).result()
    pid, unlimited = writer(), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match=r"OSError: \[Errno 27\] File too large: '.*partial'"):
        checkpoint.async_save(tmp_path, model).result()
    assert names_in(tmp_path) == ["step_00000001"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    checkpoint.async_save(tmp_path, model).result()
    assert writer() == pid and names_in(tmp_path) == ["step_00000001", "step_00000002"]


@small_states_too
def test_a_process_that_was_killed_fails_the_save_and_the_next_one_has_another(tmp_path, monkeypatch):
    model = nn.Linear(3, 3)
    checkpoint.async_save(tmp_path, model).result()
    (running,) = process._running
    asked = running.ask

    def killed(*request):
        running._process.kill()
        return asked(*request)

    monkeypatch.setattr(running, "ask", killed)
    with pytest.raises(RuntimeError, match=r"ended from outside \(exit code -9\): look whether the host"):
        checkpoint.async_save(tmp_path, model).result()
    assert names_in(tmp_path) == ["step_00000001"]
    checkpoint.async_save(tmp_path, model).result()
    assert writer() != running._process.pid and names_in(tmp_path)[1:] == ["step_00000002"]


def save_and_die(rank: int, world_size: int, folder: Path) -> None:
    process.LEAST_BYTES = 0
    model = shard("composable", net())
    checkpoint.async_save(folder, model).result()
    (folder / f"pid_{rank}").write_text(str(writer()))
    dist.barrier()
    if rank == 1:
        dying: Any = process._running[0]
        dying.ask = lambda *request: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        checkpoint.async_save(folder, model).result()


def test_it_ends_with_its_rank_killed_or_not(tmp_path):
    first, second = run_isolated(save_and_die, tmp_path, world_size=2)
    assert first.kind == "passed" and second.kind == "died", (first, second)
    pids = [int((tmp_path / f"pid_{rank}").read_text()) for rank in range(2)]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert "step_00000001" in names_in(tmp_path) and "step_00000002" not in names_in(tmp_path)


def test_it_ends_if_its_rank_was_killed_before_it_has_begun(tmp_path):
    """A fork of the rank keeps the pipe open, so the writer never sees its end."""
    rank = os.fork()
    if not rank:
        pid = process.WriterProcess()._process.pid
        os.kill(pid, signal.SIGSTOP)  # it still imports
        fork = os.fork()
        if not fork:
            signal.pause()
        (tmp_path / "pids").write_text(f"{pid} {fork}")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(rank, 0)
    pid, fork = map(int, (tmp_path / "pids").read_text().split())
    try:
        os.kill(pid, signal.SIGCONT)
        until(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        os.kill(fork, signal.SIGKILL)
