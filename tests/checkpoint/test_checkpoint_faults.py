"""Checkpoints under kills and corruption: what was complete stays loadable, what is damaged never loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bed import Outcome, ranks, run_isolated
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint
from resuming import Block, Counter, net, other, per_block_of, train
from state_nets import adamw, assert_equal

pytestmark = pytest.mark.slow

# kills

STEPS, EVERY, KILLS = 60, 2, 20


class Noisy(nn.Module):
    """Depends on random states and on a data position, besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), nn.Dropout(0.3), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def run(
    rank: int, world_size: int, folder: Path, how: str, victim: int = -1, at: int = 0, delay: float = 0.0
) -> list[float]:
    """Trains, from the newest checkpoint on; the victim is killed in a step, or after it.

    Returns what it ends with.

    Args:
        at: The step.
        delay: Of the time that the step before it took, the part after which the victim is killed.
    """
    torch.manual_seed(1)
    model = per_block_of(Noisy().double(), use_orig_params=True)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = Counter(0)
    extra = {"scheduler": scheduler, "data": data}
    torch.manual_seed(rank)
    done = checkpoint.load(folder, model, optimizer, extra).step if checkpoint.latest(folder) else 0
    pending, begin, took = None, time.monotonic(), 0.0
    for step in range(done + 1, STEPS + 1):
        took, begin = time.monotonic() - begin, time.monotonic()
        if (rank, step) == (victim, at):
            subprocess.Popen(["sh", "-c", f"sleep {delay * took:.6f}; kill -9 $PPID"])
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(data.at * 2 + rank)).double()
        data.at += 1
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step % EVERY == 0:
            if how == "async_save":
                pending = checkpoint.async_save(folder, model, optimizer, extra, step=step, keep_last=2)
            else:
                checkpoint.save(folder, model, optimizer, extra, step=step, keep_last=2)
    if pending is not None:
        pending.result()
    values = [value.double().sum().item() for value in model.state_dict().values()]
    return [*values, torch.rand(()).item()]


def ended(outcomes: list[Outcome]) -> list[list[float]]:
    assert [outcome.kind for outcome in outcomes] == ["passed", "passed"], outcomes
    return [outcome.value for outcome in outcomes]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kept(before: Path | None) -> list[list[str]]:
    """What may be there in the end, given the newest step when the run was resumed.

    The last save removes all but the last two steps. If that of the last step was killed, the resumed run has
    nothing to save: the oldest may be there still, or partly, hidden, and the
    file that the killed save had locked.
    """
    oldest, *last = (f"step_{step:08d}" for step in (STEPS - 2 * EVERY, STEPS - EVERY, STEPS))
    done = before is not None and before.name == last[-1]
    found = [last, [oldest, *last], [f".{oldest}.deleted", *last]] if done else [last]
    return [*found, *([".saving", *each] for each in found if done)]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_killed_runs_resume_to_the_same_end(tmp_path, how):
    expected = ended(run_isolated(run, tmp_path / "whole", how, world_size=2))
    moments, hit = random.Random(how), 0
    for index in range(KILLS // 2):
        folder = tmp_path / str(index)
        moment = moments.randrange(2), moments.randrange(1, STEPS), moments.uniform(0.0, 2.0)
        killed = run_isolated(run, folder, how, *moment, world_size=2)
        hit += any(outcome.kind != "passed" for outcome in killed)
        before = checkpoint.latest(folder)
        assert ended(run_isolated(run, folder, how, world_size=2)) == expected, (moment, before)
        assert names_in(folder) in kept(before), (moment, before)
    assert hit >= KILLS // 4, "too many moments came after the end of a run"


# signals


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
        assert writes.wait(60)
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


# corruption


@ranks(2)
def save_two_steps(rank, world_size, path):
    model = per_block_of(net(), use_orig_params=True)
    optimizer = adamw(model)
    for step in range(2):
        train(model, optimizer, rank, world_size, range(step, step + 1))
        checkpoint.save(path, model, optimizer, {"epoch": step, "data": Counter(rank)})


Corruption = Callable[[Path, Path, random.Random], set[str]]
"""Damages a step folder; returns the names of the files of which one must be told."""


def truncate(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    path = choice.choice(sorted(folder.iterdir()))
    os.truncate(path, choice.randrange(path.stat().st_size))
    return {path.name}


def flip(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    path = choice.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[choice.randrange(len(data))] ^= 1 << choice.randrange(8)
    path.write_bytes(data)
    return {path.name}


def delete(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    path = choice.choice(sorted(folder.iterdir()))
    path.unlink()
    return {path.name}


def swap(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    one, two = choice.sample(sorted(folder.iterdir()), 2)
    aside = folder / "aside"
    one.rename(aside), two.rename(one), aside.rename(two)
    return {one.name, two.name}


def swap_steps(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    path = choice.choice(sorted(folder.iterdir()))
    shutil.copy(earlier / path.name, path)
    # A manifest of another step contradicts all the others.
    return {path.name} if path.name != "manifest.json" else {each.name for each in folder.iterdir()}


def append(folder: Path, earlier: Path, choice: random.Random) -> set[str]:
    path = choice.choice(sorted(folder.iterdir()))
    path.write_bytes(path.read_bytes() + choice.randbytes(choice.randrange(1, 100)))
    return {path.name}


@pytest.mark.parametrize("seed", range(4))
def test_no_corruption_loads(tmp_path, seed):
    save_two_steps(path=tmp_path / "run", world_size=2)
    assert sorted(path.name for path in (tmp_path / "run" / "step_00000002").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]
    earlier, folder = (tmp_path / "run" / f"step_{step:08d}" for step in (1, 2))
    model = other(net())
    optimizer, data = adamw(model), Counter(-1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    choice = random.Random(seed)
    corruptions: list[Corruption] = [truncate, flip, delete, swap, swap_steps, append]
    for index in range(50):
        corrupt = corruptions[index % len(corruptions)]
        damaged = shutil.copytree(folder, tmp_path / "damaged" / folder.name)
        told = corrupt(damaged, earlier, choice)
        state: Any = torch.get_rng_state()
        with pytest.raises(DamagedCheckpoint) as refused:
            checkpoint.load(damaged, model, optimizer, {"data": data})
        assert any(f"\n  {name} " in str(refused.value) for name in told), (corrupt, told, refused.value)
        assert_equal(model.state_dict(), expected)
        assert optimizer.state_dict()["state"] == {} and data.at == -1
        assert torch.equal(torch.get_rng_state(), state)
        shutil.rmtree(damaged)
    with pytest.warns(UserWarning, match="saved by 2 ranks, and data of extra"):
        checkpoint.load(folder, model, optimizer, {"data": data})
    assert data.at == 0
