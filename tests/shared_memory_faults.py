"""Trains with shared memory again and again, and kills a rank each time: a program for test_shared_memory.py.

Usage: python shared_memory_faults.py TRIALS
"""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._channel import Channel
from fsdp_wrap.wrap import ModuleWrapPolicy

RANKS, LIMIT = 3, 30.0
SOON = 8.0
"""Seconds within which survivors must end, far less than the group's limit."""

PHASES = {"post": Channel.post, "arrived": Channel.arrived, "read": Channel.read, "release": Channel.release}


def main(trials: int) -> None:
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "1"
    torch.set_num_threads(1)
    for trial in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            run(trial, Path(folder))
    print(f"{trials} trials passed")


def run(trial: int, folder: Path) -> None:
    """One trial: of every few, one is without a kill."""
    draw = random.Random(trial)
    victims = draw.sample(range(RANKS), draw.choice([1, 1, 1, 2])) if trial % 6 else []
    plan = draw.choice([*PHASES, "between steps", "at any time"]), draw.randrange(1, 60)
    children = [fork(rank, victims, plan, folder) for rank in range(RANKS)]
    begin = time.monotonic()
    codes: dict[int, int] = {}
    if plan[0] == "at any time":
        time.sleep(draw.uniform(0, 3.0))
        for victim in victims:
            os.kill(children[victim], signal.SIGKILL)
    while len(codes) < RANKS:
        for rank, child in enumerate(children):
            ended, status = os.waitpid(child, os.WNOHANG) if rank not in codes else (0, 0)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
        if time.monotonic() - begin > LIMIT + SOON:
            break
    reports = {path.name: path.read_text() for path in folder.glob("report*")}
    for rank in range(RANKS):
        expected = -signal.SIGKILL if rank in victims else 0
        assert codes.get(rank) == expected, (trial, plan, victims, codes, reports)
    print(trial, plan, victims, flush=True)


def fork(rank: int, victims: list[int], plan: tuple[str, int], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = survive(rank, rank in victims, plan, folder, bool(victims))
    except BaseException:
        (folder / f"report{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def survive(rank: int, dies: bool, plan: tuple[str, int], folder: Path, killed: bool) -> int:
    """Returns 0 if training ended as it should: in an error that tells of the dead, unless nobody died."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LIMIT),
    )
    if dies and plan[0] in PHASES:
        die_in(*plan)
    try:
        train(plan[1] // 6 if dies and plan[0] == "between steps" else 10**9, endless=killed)
    except RuntimeError as error:
        (folder / f"report{rank}").write_text(str(error))
        return 0 if killed and not dies and "rank" in str(error) else 2
    return 3 if killed else 0


def die_in(phase: str, calls: int) -> None:
    """Lets this process end in some call of a method of the channel."""
    left = [calls]

    def deadly(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return PHASES[phase](*args, **kwargs)

    setattr(Channel, phase, deadly)


def train(last: int, endless: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3)))
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, first = 0, None
    while endless or step < 5:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (model(torch.ones(4, 128)) - 1).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        first = loss.item() if first is None else first
        step += 1
    assert loss.item() < first


if __name__ == "__main__":
    main(int(sys.argv[1]))
