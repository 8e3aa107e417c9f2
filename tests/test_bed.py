"""The test bed itself: what it runs, what it reports, and that no test disturbs the next."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from bed import RankFailure, patience, ranks, run_isolated, run_ranks
from bed.memory import live_bytes
from bed.paths import TESTS
from bed.patience import until
from bed.references import Traffic, count_collectives
from bed.sampling import DRAW, draw, sample
from bed.scripts import here

FORBIDDEN_TO_TRAVEL = "cannot be pickled, so it cannot reach the ranks"


def pid_of(rank: int, world_size: int) -> int:
    return os.getpid()


def echo(rank: int, world_size: int, value: Any) -> tuple[int, int, Any]:
    return rank, world_size, value


def failure_of(fn: Any, *args: Any, world_size: int = 2, **options: Any) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(world_size, fn, *args, grace=0.5, **options)
    return caught.value


# What runs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("size", [1, 5])
def test_parameters_and_fixtures_reach_the_ranks(rank, world_size, dtype, size, tmp_path):
    assert isinstance(dtype, torch.dtype) and size in (1, 5)
    (tmp_path / f"{rank}").touch()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == [f"{number}" for number in range(world_size)]
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "gloo")
    drawn = torch.rand(2)
    gathered = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(gathered, drawn)
    assert all(torch.equal(tensor, drawn) for tensor in gathered)
    assert torch.get_num_threads() == 1


@ranks(2, backend=None)
def test_without_a_process_group(rank, world_size):
    assert not dist.is_initialized()


def test_results_come_in_rank_order_from_the_same_processes():
    assert run_ranks(3, echo, "x") == [(rank, 3, "x") for rank in range(3)]
    assert torch.equal(run_ranks(1, echo, torch.arange(3))[0][2], torch.arange(3))
    assert run_ranks(2, pid_of) == run_ranks(3, pid_of)[:2]
    (outcome,) = run_isolated(pid_of)
    assert outcome.value == outcome.pid not in run_ranks(4, pid_of)


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="has 1 to 4 ranks, not 5"):
        run_ranks(5, pid_of)
    with pytest.raises(TypeError, match=f"a parameter of echo {FORBIDDEN_TO_TRAVEL} .*lambda"):
        run_ranks(1, echo, lambda: None)
    with pytest.raises(TypeError, match="must be a module-level function"):
        run_ranks(1, lambda rank, world_size: None)


# What is left behind.


def leave_a_mess(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    init_device_mesh("cpu", (2, world_size // 2))


def assert_clean(rank: int, world_size: int) -> None:
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "LEFT_BEHIND" not in os.environ


def test_the_next_job_finds_everything_clean():
    run_ranks(2, leave_a_mess)
    run_ranks(2, assert_clean)


def use_dtensors(rank: int, world_size: int, groups_before: int) -> None:
    for _ in range(groups_before):  # other names for the mesh's groups
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    local = torch.full((2,), float(mesh.get_local_rank(0) + 1))
    sharded = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
    assert (sharded + sharded).sum().full_tensor().item() == 12


def test_dtensors_of_one_job_do_not_reach_into_the_next():
    for groups_before in (2, 0, 1):
        run_ranks(4, use_dtensors, groups_before)


# What fails.


def fail_on_last(rank: int, world_size: int) -> None:
    print(f"spoken by {rank}")
    expected = 17
    assert rank < world_size - 1 or rank == expected, "a reason"
    dist.barrier()


def fail_everywhere(rank: int, world_size: int) -> None:
    raise KeyError("everywhere")


def sleep_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        time.sleep(3600)


def end_with(rank: int, world_size: int, how: str) -> None:
    dist.barrier()
    if rank == 0:
        print("last words", file=sys.stderr)
        os._exit(7) if how == "exit" else os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


def return_a_lambda(rank: int, world_size: int) -> Any:
    return lambda: None


def disagree_on_skipping(rank: int, world_size: int) -> None:
    if rank == 0:
        pytest.skip("only here")


FAILING = ["rank 1 of 2 failed: AssertionError: a reason", "in fail_on_last", "in barrier"]
"""The headline, the traceback, and the stack of the rank that waits."""


@pytest.mark.parametrize(
    ("body", "options", "ends", "shown"),
    [
        # With pytest's values, and the output of all.
        (fail_on_last, {}, "hung failed", [*FAILING, "assert (1 < (2 - 1)", "spoken by 0", "spoken by 1"]),
        (fail_everywhere, {"world_size": 3}, "failed failed failed", ["---- ranks 0, 1, 2 failed ----"]),
        (sleep_on_last, {"timeout": 1.0}, "passed hung", ["no rank at work for 1.", "in sleep_on_last"]),
        (return_a_lambda, {}, "failed failed", ["lambda"]),
        (disagree_on_skipping, {}, "skipped passed", ["only here"]),
    ],
)
def test_failing_ranks(body, options, ends, shown):
    failure = failure_of(body, **options)
    assert [outcome.kind for outcome in failure.outcomes] == ends.split()
    assert [text for text in shown if text not in str(failure)] == []


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        (lambda now: {}, 8),  # where the system tells nothing
        (lambda now: {1: (50.0, 9.0), 2: (0.02 * now, 0.1 * now)}, 8),  # they look now and then, but wait
        (lambda now: {1: (0.1 * min(now, 30), 0.0)}, 38),
        (lambda now: {1: (0.01 * now, 0.9 * min(now, 30))}, 38),  # beside a hundred others
        (lambda now: dict.fromkeys((1, 2), (0.01 * now, 0.4 * min(now, 30))), 38),  # and one after the other
        (lambda now: {now: (50.0, 50.0)}, 8),  # of another thread each time nothing is known
        (lambda now: {1: (now, 0.0)}, 100),
    ],
)
def test_ranks_are_ended_that_do_not_work_or_work_without_an_end(taken, expected):
    """`taken` says how long threads have run, and waited for a processor, at a time."""
    clock = SimpleNamespace(now=0)
    with (
        mock.patch.object(patience, "time", SimpleNamespace(monotonic=lambda: clock.now)),
        mock.patch.object(patience, "_seconds_taken", lambda _: taken(clock.now)),
    ):
        waiting = patience.Patience(8.0, 100.0)
        while not waiting.has_ended([]):
            clock.now += 1
        assert clock.now == expected
        what = "though at work" if expected == 100 else "no rank at work for 8.0 s"
        assert str(waiting) == f"no answer after {expected:.1f} s, {what}"


BUSY = "import time\nwhile time.process_time() < 2.5: pass"


def wait_for_another(rank: int, world_size: int) -> None:
    script = '"$0" -c "$1"; exit $?'  # so that the shell stays, and its child is the one at work
    subprocess.run(["sh", "-c", script, sys.executable, BUSY], check=True)


def test_a_rank_may_wait_for_processes_that_it_has_started():
    run_ranks(1, wait_for_another, timeout=1.0)


@pytest.mark.parametrize(
    ("how", "said", "shown"),
    [
        ("SIGKILL", "killed by SIGKILL", "last words"),
        ("exit", "exited with code 7", "last words"),
        ("SIGSEGV", "killed by SIGSEGV", "in end_with"),
    ],
)
def test_dead_rank(how, said, shown):
    failure = failure_of(end_with, how)
    assert (failure.outcomes[0].kind, failure.outcomes[0].headline) == ("died", said)
    assert said in str(failure) and shown in str(failure)


def test_a_failure_is_followed_by_fresh_ranks():
    before = run_ranks(2, pid_of)
    failure = failure_of(fail_everywhere)
    assert [outcome.pid for outcome in failure.outcomes] == before
    assert not set(before) & set(run_ranks(2, pid_of))
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# Which tier a test is of.


class Combination:
    """An item of pytest, as far as drawing asks it."""

    def __init__(self, *values: int, marks: Sequence[pytest.MarkDecorator] = ()) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{'-'.join(map(str, values))}]"
        self.callspec = SimpleNamespace(params={f"parameter {n}": value for n, value in enumerate(values)})
        self.marks = {marker.name: marker.mark for marker in marks}
        self.get_closest_marker = self.marks.get

    def iter_markers(self) -> Iterable[pytest.Mark]:
        return self.marks.values()

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks[marker.name] = marker.mark

    @property
    def is_slow(self) -> bool:
        return "slow" in self.marks


LONG = range(1, 1001)
"""Numbers of the combinations of which a half is drawn."""


def sampled(thorough: bool = False, given: Sequence[str] = ()) -> list[Combination]:
    """Samples all combinations of three parameters, and some that are marked by hand."""
    items = [Combination(*values) for values in itertools.product(range(10), repeat=3)]
    items += [Combination(n, marks=[pytest.mark.left_over]) for n in range(1000)]
    items += [Combination(-n, marks=[pytest.mark.left_over(2)]) for n in LONG]
    with mock.patch("bed.sampling.THOROUGH", thorough):
        omitted = sample(items, given)  # type: ignore[arg-type]
    assert len(items) + len(omitted) == 3000 and all(item.is_slow for item in omitted)
    return items


def ids(items: Iterable[Combination], slow: bool) -> set[str]:
    return {item.nodeid for item in items if item.is_slow is slow}


def test_a_part_of_the_left_over_combinations_is_drawn_by_the_commit(monkeypatch):
    every, drawn = sampled(thorough=True), sampled()
    assert ids(drawn, slow=False) == ids(every, slow=False)
    assert {item.callspec.params["parameter 0"] for item in drawn if not item.is_slow} == {*range(10)}
    long = {item.nodeid for item in drawn if item.callspec.params["parameter 0"] < 0}
    assert len(long) == pytest.approx(len(LONG) / 2, rel=0.2)
    others = len(ids(every, slow=True)) - len(LONG)
    assert len(ids(drawn, slow=True) - long) == pytest.approx(others / 8, rel=0.3)
    assert ids(sampled(), slow=True) == ids(drawn, slow=True)
    assert os.environ[DRAW] == draw() != "", "so that all workers draw alike"
    monkeypatch.setenv(DRAW, "another commit")
    assert ids(sampled(), slow=True) != ids(drawn, slow=True)
    left = min(ids(every, slow=True) - ids(drawn, slow=True))
    assert left in ids(sampled(given=[left]), slow=False)


# Processes of their own.


def announce_and_hang(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / f"{rank}.tmp").write_text(str(os.getpid()))
    (Path(folder) / f"{rank}.tmp").rename(Path(folder) / f"{rank}.pid")
    time.sleep(3600)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a hung rank may outlive its parent")
def test_no_rank_survives_its_parent(tmp_path):
    script = "import bed, sys, test_bed; bed.run_ranks(2, test_bed.announce_and_hang, sys.argv[1])"
    environment = here(PYTHONPATH=str(TESTS), TMPDIR=str(tmp_path))  # killed, it leaves its files
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=TESTS, env=environment)
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    parent.kill()
    parent.wait()
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    until(lambda: not any(map(is_running, pids)))


# What pytest shows.


# Memory and traffic.


def _is_double(tensor):
    return tensor.dtype is torch.float64


def test_live_bytes():
    before, doubles = live_bytes(), live_bytes(_is_double)
    tensor = torch.zeros(1000)
    views = [tensor[10:], tensor.view(10, 100), tensor.detach()]
    assert live_bytes() - before == 4000
    assert live_bytes(_is_double) == doubles
    tensor.untyped_storage().resize_(0)
    assert live_bytes() == before
    torch.zeros(1000, device="meta")
    del tensor, views
    leaf = torch.ones(500, requires_grad=True)
    saved = leaf * 2
    loss = saved * saved
    del saved  # autograd keeps it
    assert live_bytes() - before == 6000
    del loss
    assert live_bytes() - before == 2000


@ranks(2)
def test_count_collectives(rank, world_size):
    shard, full = torch.ones(4), torch.empty(8)
    leaf = torch.ones(8, requires_grad=True)

    def reduce_and_gather(gradient: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(shard, gradient.clone(), async_op=True).wait()
        dist.all_gather_into_tensor(full, shard, async_op=True).wait()

    leaf.register_hook(reduce_and_gather)
    with count_collectives() as counts:
        dist.all_gather_into_tensor(full, shard, async_op=True).wait()
        (leaf * 3).sum().backward()
        dist.all_reduce(shard)
    dist.all_reduce(shard)
    assert torch.equal(full, torch.full((8,), 6.0))
    assert counts == {
        "all_gather_into_tensor": Traffic(2, 64),
        "reduce_scatter_tensor": Traffic(1, 32),
        "all_reduce": Traffic(1, 16),
    }
