"""A long run with saves, kills and resumes at other numbers of ranks ends as one that nobody disturbed.

The environment variable FSDP_WRAP_SOAK_STEPS sets its length; 2000 is the full one.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
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

from bed import run_isolated
from fronts import full_state, shard
from fsdp_wrap import checkpoint
from fsdp_wrap.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("FSDP_WRAP_SOAK_STEPS", "600"))
EVERY, WIDTH, BATCH, MOST_RANKS = 50, 8, 12, 4
KILLED, LOST = -signal.SIGKILL, 7
RSS, DESCRIPTORS, MAPS, THREADS = 8 * 2**20, 0, 8, 0
"""How much more a rank may have at the end than after a third of the run."""


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
    """What a process has."""

    rss: int
    descriptors: int
    maps: int
    threads: int

    @classmethod
    def now(cls) -> Sample:
        """Returns that of this process."""
        own = Path("/proc/self")
        pages = int((own / "statm").read_text().split()[1])
        maps = (own / "maps").read_text().count("\n")
        descriptors, tasks = (len(os.listdir(own / name)) for name in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, maps, tasks)


@dataclass(frozen=True)
class Kill:
    """Which rank ends in or after which step, and how many seconds after its begin."""

    rank: int
    step: int
    delay: float


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """A rank's part of the step's batch, of whole numbers; the sum over ranks is that of one rank alone."""
    whole = torch.randint(-2, 3, (BATCH, WIDTH), generator=torch.Generator().manual_seed(step))
    return whole.double().chunk(world_size)[rank]


def train(
    rank: int, world_size: int, front: str, folder: Path, steps: int, kill: Kill | None
) -> tuple[dict[str, torch.Tensor], list[Sample]]:
    """Trains from the newest checkpoint on; returns what it ends with, and a sample before every save."""
    try:
        return _train(rank, world_size, front, folder, steps, kill)
    except RuntimeError:
        if kill is None:
            raise
        os._exit(LOST)  # as a program does; whoever waits for this rank notices


def _train(
    rank: int, world_size: int, front: str, folder: Path, steps: int, kill: Kill | None
) -> tuple[dict[str, torch.Tensor], list[Sample]]:
    torch.manual_seed(0)
    model = shard(front, nn.Sequential(Layer(), Layer(), Layer()), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1 / 64)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    extra = {"scheduler": scheduler}
    done = checkpoint.load(folder, model, optimizer, extra).step if checkpoint.latest(folder) else 0
    samples: list[Sample] = []
    saved: Any = None
    for step in range(done + 1, steps + 1):
        if kill is not None and (kill.rank, kill.step) == (rank, step):
            threading.Timer(kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        optimizer.zero_grad()
        loss = model(batch(step, rank, world_size)).sum() * world_size
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % EVERY == 0:
            samples.append(Sample.now())
            save = checkpoint.save if step % (2 * EVERY) else checkpoint.async_save
            saved = save(folder, model, optimizer, extra, step=step, keep_last=2)
    if isinstance(saved, checkpoint.PendingSave):
        saved.result()
    if kill is not None:  # which comes after the last step
        time.sleep(10 * (kill.rank == rank))
        dist.barrier()
    return {name: value.clone() for name, value in full_state(model).items()}, samples


def kills(seed: int, steps: int) -> Iterator[tuple[int, Kill | None]]:
    """Yields how many ranks run next, and what ends them; at last nothing does."""
    choice, step = random.Random(seed), 0
    for world_size in itertools.cycle(choice.sample(range(1, MOST_RANKS + 1), MOST_RANKS)):
        step += choice.randrange(EVERY, 6 * EVERY)
        if step >= steps:
            yield world_size, None
            return
        yield world_size, Kill(choice.randrange(world_size), step, choice.uniform(0, 0.05))


def assert_flat(samples: list[Sample]) -> None:
    before, after = samples[len(samples) // 3], samples[-1]
    allowed = Sample(RSS, DESCRIPTORS, MAPS, THREADS)
    assert all(late <= early + more for early, late, more in zip(before, after, allowed)), (before, after)


@pytest.mark.parametrize("front", ["orig", "composable"])
def test_a_run_with_kills_and_other_ranks_ends_as_one_without(tmp_path, front):
    whole = run_isolated(train, front, tmp_path / "whole", STEPS, None, world_size=2, timeout=900.0)
    assert [outcome.kind for outcome in whole] == ["passed", "passed"], whole
    for outcome in whole:
        print(front, "uninterrupted:", outcome.value[1][len(outcome.value[1]) // 3], outcome.value[1][-1])
        assert_flat(outcome.value[1])
    folder, ended, sizes = tmp_path / "killed", [], []
    for world_size, kill in kills(7, STEPS):
        ended = run_isolated(train, front, folder, STEPS, kill, world_size=world_size, timeout=900.0)
        found = [outcome.exitcode if outcome.kind == "died" else outcome.kind for outcome in ended]
        expected = (
            ["passed"] * world_size
            if kill is None
            else [KILLED if rank == kill.rank else LOST for rank in range(world_size)]
        )
        assert found == expected, (kill, ended)
        newest = checkpoint.latest(folder)
        sizes.append((world_size, newest.name if newest else None))
    print(front, "resumed by", sizes)
    expected_state = whole[0].value[0]
    for outcome in ended:
        for name, value in outcome.value[0].items():
            assert torch.equal(value, expected_state[name]), name
    assert sorted(path.name for path in folder.iterdir()) == [
        f"step_{step:08d}" for step in (STEPS - EVERY, STEPS)
    ]
