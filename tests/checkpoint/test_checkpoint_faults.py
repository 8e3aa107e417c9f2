"""Checkpoints under kills and corruption: what was complete stays loadable, what is damaged never loads.

The environment variable FSDP_WRAP_SOAK_STEPS sets the length of the long runs; 2000 is the full one.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import Outcome, ranks, run_isolated
from bed.patience import NEVER
from fronts import either_front, full_state, shard
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint
from fsdp_wrap.wrap import ModuleWrapPolicy
from resuming import Counter, names_in, net, other, per_block_of, train
from state_nets import adamw, assert_equal

pytestmark = pytest.mark.slow


STEPS, EVERY, KILLS = 40, 2, 5
LONG, SELDOM, MOST_RANKS = int(os.environ.get("FSDP_WRAP_SOAK_STEPS", "300")), 25, 4
WIDTH, BATCH = 8, 12
KILLED, LOST = -signal.SIGKILL, 7


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(weight > 0, 1.0, -1.0).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Layer(nn.Module):
    """Computes with the signs of its weights: all sums are of whole numbers, and so exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, _Sign.apply(self.weight), _Sign.apply(self.bias)).clamp(-4, 4)


class Sample(NamedTuple):
    rss: int
    descriptors: int
    maps: int
    threads: int

    @classmethod
    def now(cls) -> Sample:
        own = Path("/proc/self")
        pages = int((own / "statm").read_text().split()[1])
        maps = (own / "maps").read_text().count("\n")
        descriptors, tasks = (len(os.listdir(own / name)) for name in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, maps, tasks)


GROWTH = Sample(8 * 2**20, 0, 8, 0)
"""How much more a rank may have at the end than after a third of the run."""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed at which step, after which fraction of the time that the step before took."""

    rank: int
    step: int
    delay: float


@dataclass(frozen=True)
class Program:
    """What runs.

    Args:
        noisy: Whether the model depends on random states, too.
        how: By which function it saves; by both in turn if empty.
    """

    front: str
    noisy: bool
    how: str
    steps: int
    every: int


def run(
    rank: int, world_size: int, program: Program, folder: Path, kill: Kill | None = None
) -> tuple[dict[str, torch.Tensor], float, list[Sample]]:
    """Trains, from the newest checkpoint on; returns what it ends with, and a sample before every save."""
    try:
        return _run(rank, world_size, program, folder, kill)
    except RuntimeError:
        if kill is None:
            raise
        os._exit(LOST)  # as a program does; whoever waits for this rank notices


def _run(
    rank: int, world_size: int, program: Program, folder: Path, kill: Kill | None
) -> tuple[dict[str, torch.Tensor], float, list[Sample]]:
    torch.manual_seed(1)
    layers = nn.Sequential(Layer(), nn.Dropout(0.5 * program.noisy), Layer(), Layer())
    model = shard(program.front, layers, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 64)
    scheduler, data = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.99), Counter(0)
    extra = {"scheduler": scheduler, "data": data}
    torch.manual_seed(rank)
    done = checkpoint.load(folder, model, optimizer, extra).step if checkpoint.latest(folder) else 0
    samples: list[Sample] = []
    saved: Any = None
    begin, took = time.monotonic(), 0.0
    for step in range(done + 1, program.steps + 1):
        took, begin = time.monotonic() - begin, time.monotonic()
        if kill is not None and (kill.rank, kill.step) == (rank, step):
            subprocess.Popen(["sh", "-c", f"sleep {kill.delay * took:.6f}; kill -9 $PPID"])
        optimizer.zero_grad()
        (model(batch(data.at, rank, world_size)).sum() * world_size).backward()
        data.at += 1
        optimizer.step()
        scheduler.step()
        if step % program.every == 0:
            samples.append(Sample.now())
            how = program.how or ("async_save" if step % (2 * program.every) == 0 else "save")
            save = getattr(checkpoint, how)
            saved = save(folder, model, optimizer, extra, step=step, keep_last=2)
    if isinstance(saved, checkpoint.PendingSave):
        saved.result()
    if kill is not None:  # which comes after the last step
        time.sleep(10 * (kill.rank == rank))
        dist.barrier()
    state = {name: value.clone() for name, value in full_state(model).items()}
    return state, torch.rand(()).item(), samples


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of the step's batch, of whole numbers; the sum over ranks is that of one rank alone."""
    whole = torch.randint(-2, 3, (BATCH, WIDTH), generator=torch.Generator().manual_seed(step))
    return whole.double().chunk(world_size)[rank]


def ended(outcomes: list[Outcome]) -> list[Any]:
    assert [outcome.kind for outcome in outcomes] == ["passed"] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def assert_killed(outcomes: list[Outcome], kill: Kill) -> None:
    expected = [KILLED if rank == kill.rank else LOST for rank in range(len(outcomes))]
    ends = [outcome.exitcode if outcome.kind == "died" else outcome.kind for outcome in outcomes]
    assert ends == expected, (kill, outcomes)


def kept(before: Path | None) -> list[list[str]]:
    """What may be there in the end, given the newest step when the run was resumed.

    The last save removes all but the last two steps. If that of the last step was killed, the resumed run has
    nothing to save: the oldest may be there still, or partly, hidden, and the
    file that the killed save had locked.
    """
    oldest, *last = (f"step_{step:08d}" for step in (STEPS - 2 * EVERY, STEPS - EVERY, STEPS))
    done = before is not None and before.name == last[-1]
    contents = [last, [oldest, *last], [f".{oldest}.deleted", *last]] if done else [last]
    return [*contents, *([".saving", *names] for names in contents if done)]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_runs_that_are_killed_over_and_over_resume_to_the_same_end(tmp_path, how):
    """Each resumed run is killed a few steps after the former: what one has lost shows at the end."""
    program = Program("orig", True, how, STEPS, EVERY)
    expected = ended(run_isolated(run, program, tmp_path / "whole", world_size=2))
    moments, folder = random.Random(how), tmp_path / "killed"
    for left in reversed(range(KILLS)):
        before = checkpoint.latest(folder)
        done = int(before.name.removeprefix("step_")) if before is not None else 0
        step = min(done + moments.randrange(1, 7), STEPS) if left else STEPS - moments.randrange(EVERY)
        kill = Kill(moments.randrange(2), step, moments.uniform(0.0, 2.0))
        assert_killed(run_isolated(run, program, folder, kill, world_size=2), kill)
    before = checkpoint.latest(folder)
    for result, wanted in zip(ended(run_isolated(run, program, folder, world_size=2)), expected):
        assert_equal(result[0], wanted[0])
        assert result[1] == wanted[1], (kill, before)
    assert names_in(folder) in kept(before), (kill, before)


def kills(seed: int, steps: int) -> Iterator[tuple[int, Kill | None]]:
    """Yields how many ranks run next, and what ends them; at last nothing does."""
    choice, step = random.Random(seed), 0
    for world_size in itertools.cycle(choice.sample(range(1, MOST_RANKS + 1), MOST_RANKS)):
        step += choice.randrange(SELDOM, 6 * SELDOM)
        if step >= steps:
            yield world_size, None
            return
        yield world_size, Kill(choice.randrange(world_size), step, choice.uniform(0, 2.0))


@either_front
def test_a_run_with_kills_and_other_ranks_ends_as_one_without(tmp_path, front):
    program = Program(front, False, "", LONG, SELDOM)
    whole = ended(run_isolated(run, program, tmp_path / "whole", None, world_size=2, timeout=900.0))
    for *_, samples in whole:
        before, after = samples[len(samples) // 3], samples[-1]
        assert all(late <= early + more for early, late, more in zip(before, after, GROWTH)), (before, after)
    folder = tmp_path / "killed"
    for world_size, kill in kills(7, LONG):
        outcomes = run_isolated(run, program, folder, kill, world_size=world_size, timeout=900.0)
        if kill is not None:
            assert_killed(outcomes, kill)
    for state, *_ in ended(outcomes):
        assert_equal(state, whole[0][0])
    assert names_in(folder) == [f"step_{step:08d}" for step in (LONG - SELDOM, LONG)]


def interrupted(rank: int, world_size: int, folder: Path, handled: bool) -> str:
    """The second rank gets SIGTERM while its background save writes; returns what the save says."""
    model = per_block_of(net(), use_orig_params=True)
    checkpoint.save(folder, model)
    writes, goes_on, sync = threading.Event(), threading.Event(), os.fsync

    def wait_and_sync(descriptor: int) -> None:
        writes.set()
        goes_on.wait()
        sync(descriptor)

    if rank == 1:
        os.fsync = wait_and_sync  # type: ignore[assignment]
        if handled:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
    pending = checkpoint.async_save(folder, model)
    if rank == 1:
        assert writes.wait(NEVER)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        goes_on.set()
    try:
        return pending.result().name
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_in_a_background_save_leaves_whole_steps(tmp_path, handled):
    """A handler's exception does not end the save; a process that the signal ends leaves the earlier step."""
    outcomes = run_isolated(interrupted, tmp_path, handled, world_size=2)
    assert outcomes[0].kind == "passed", outcomes
    if handled:
        assert [outcome.value for outcome in outcomes] == ["step_00000002"] * 2
    else:
        assert outcomes[1].kind != "passed" and "rank 1 died" in outcomes[0].value
        assert checkpoint.latest(tmp_path).name == "step_00000001"
        checkpoint.save(tmp_path, net())
    assert names_in(tmp_path) == ["step_00000001", "step_00000002"]


@ranks(2)
def save_two_steps(rank, world_size, path):
    model = per_block_of(net(), use_orig_params=True)
    optimizer = adamw(model)
    for step in range(2):
        train(model, optimizer, rank, world_size, range(step, step + 1))
        checkpoint.save(path, model, optimizer, {"epoch": step, "data": Counter(rank)})


CORRUPTIONS = ["truncate", "flip", "delete", "swap", "another step's", "append"]


def corrupt(how: str, folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    """Damages a step folder; returns the names of files, one of which the error must name."""
    path, other = choice.sample(sorted(folder.iterdir()), 2)
    data = bytearray(path.read_bytes())
    if how == "truncate":
        del data[choice.randrange(len(data)) :]
    elif how == "flip":
        data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    elif how == "append":
        data += choice.randbytes(choice.randrange(1, 100))
    elif how == "another step's":
        data[:] = (earlier / path.name).read_bytes()
    elif how == "swap":
        swapped, data = data, bytearray(other.read_bytes())
        other.write_bytes(swapped)
    path.unlink() if how == "delete" else path.write_bytes(data)
    # A manifest of another step contradicts all the others.
    alike = how == "another step's" and path.name == "manifest.json"
    return (
        {entry.name for entry in folder.iterdir()} if alike else {path.name, *[other.name] * (how == "swap")}
    )


def test_no_corruption_loads(tmp_path):
    save_two_steps(path=tmp_path / "run", world_size=2)
    earlier, folder = (tmp_path / "run" / f"step_{step:08d}" for step in (1, 2))
    assert names_in(folder) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    model = other(net())
    optimizer, data = adamw(model), Counter(-1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    choice = random.Random(0)

    for index in range(200):
        how = CORRUPTIONS[index % len(CORRUPTIONS)]
        damaged = shutil.copytree(folder, tmp_path / "damaged" / folder.name)
        told = corrupt(how, damaged, earlier, choice)
        state: Any = torch.get_rng_state()
        with pytest.raises(DamagedCheckpoint) as refused:
            checkpoint.load(damaged, model, optimizer, {"data": data})
        assert any(f"\n  {name} " in str(refused.value) for name in told), (how, told, refused.value)
        assert_equal(model.state_dict(), expected)
        assert optimizer.state_dict()["state"] == {} and data.at == -1
        assert torch.equal(torch.get_rng_state(), state)
        shutil.rmtree(damaged)
    with pytest.warns(UserWarning, match="saved by 2 ranks, and data of extra"):
        checkpoint.load(folder, model, optimizer, {"data": data})
    assert data.at == 0
