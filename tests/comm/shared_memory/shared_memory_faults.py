"""Trains with shared memory again and again, and kills ranks most times: a program for test_shared_memory.py.

Usage: python shared_memory_faults.py TRIALS
"""

import contextlib
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
from fsdp_wrap._comm import positions as _positions
from fsdp_wrap._comm.shared_memory.channel import Channel, Kind
from fsdp_wrap.wrap import ModuleWrapPolicy

RANKS, LIMIT = 3, 600.0
"""The limit, in seconds, is the group's: survivors must end without it."""

PHASES = {
    "post": Channel.post,
    "arrived": Channel.arrived,
    "read": Channel.read,
    "release": Channel.release,
}
COLLECTIVES = ("COMMON_GATHER", "REDUCE_SCATTER", "ALL_REDUCE")
"""In the last of these all ranks wait for all: it is the barrier of a step."""

FIRST = [(rank, phase) for rank in range(RANKS) for phase in (*COLLECTIVES, "between steps")]
"""Each rank in each phase of a step; what comes after these trials is drawn."""


def main(trials: int) -> None:
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "1"  # also where all other tests run over gloo
    torch.set_num_threads(1)
    longest = 0.0
    for trial in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            longest = max(longest, run(trial, Path(folder)))
    print(f"{trials} trials passed; survivors ended within {longest:.1f} s of a kill")


def run(trial: int, folder: Path) -> float:
    """One trial: of every few, one is without a kill. Returns how long survivors took to end."""
    draw = random.Random(trial)
    victims = draw.sample(range(RANKS), draw.choice([1, 1, 1, 2])) if trial % 6 else []
    plan = draw.choice([*PHASES, "between steps", "at any time"]), draw.randrange(1, 60)
    if trial < len(FIRST):
        victims, plan = [FIRST[trial][0]], (FIRST[trial][1], 4)
    for name in ("positions", "temporary", "trained"):
        (folder / name).mkdir()
    children = [fork(rank, victims, plan, folder) for rank in range(RANKS)]
    try:
        if victims and plan[0] == "at any time":
            while len(list((folder / "trained").iterdir())) < RANKS:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1.0))
            for victim in victims:
                os.kill(children[victim], signal.SIGKILL)
        codes, ends = await_all(children)
        reports = {path.name: path.read_text() for path in folder.glob("report*")}
        told = (trial, plan, victims, codes, ends, reports)
        if plan[0] in PHASES:  # ranks call as often or not: of two, either may notice first
            victims = [victim for victim in victims if codes.get(victim) == -signal.SIGKILL] or victims
        assert codes == {rank: -signal.SIGKILL if rank in victims else 0 for rank in range(RANKS)}, told
        took = max(ends.values()) - min([ends[victim] for victim in victims], default=max(ends.values()))
        names = sorted(path.name for path in (folder / "temporary").iterdir())
        assert not [name for name in names if not name.startswith("torchinductor_")], (names, told)
        assert not any(in_group(child) for child in children), told
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
    print(trial, plan, victims, f"{took:.2f} s", flush=True)
    return took


def await_all(children: list[int]) -> tuple[dict[int, int], dict[int, float]]:
    """Returns the exit codes of the ranks that have ended in time, and when they did."""
    codes: dict[int, int] = {}
    ends: dict[int, float] = {}
    begin = time.monotonic()
    while len(codes) < RANKS and time.monotonic() - begin < LIMIT / 2:
        for rank, child in enumerate(children):
            ended, status = os.waitpid(child, os.WNOHANG) if rank not in codes else (0, 0)
            if ended:
                codes[rank], ends[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.01)
    return codes, ends


def in_group(leader: int) -> bool:
    """Whether any process is left of those that a rank has started, or itself."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def fork(rank: int, victims: list[int], plan: tuple[str, int], folder: Path) -> int:
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(child, child)
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        tempfile.tempdir = str(folder / "temporary")
        _positions._directory = lambda: folder / "positions"  # whose files a later job removes
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
    elif dies and plan[0] in COLLECTIVES:
        die_in("post", plan[1], Kind[plan[0]])
    last = 1 + plan[1] // 6 if dies and plan[0] == "between steps" else 10**9
    try:
        train(last, killed, folder / "trained" / str(rank))
    except RuntimeError as error:
        (folder / f"report{rank}").write_text(str(error))
        return 0 if killed and "rank" in str(error) and not named_files() else 2
    return 3 if killed or named_files() else 0


def named_files() -> list[str]:
    """Files in shared memory that this process has open or mapped and that have a name."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    links += [line[5] for line in lines if len(line) > 5]
    return [link for link in links if link.startswith("/dev/shm/") and not link.endswith("(deleted)")]


def die_in(phase: str, calls: int, kind: Kind | None = None) -> None:
    """Lets this process end in some call of a method of the channel, perhaps for one kind of collective."""
    left = [calls]

    def deadly(*args, **kwargs):
        left[0] -= kind is None or kind in args
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return PHASES[phase](*args, **kwargs)

    setattr(Channel, PHASES[phase].__name__, deadly)


def train(last: int, endless: bool, trained: Path) -> None:
    """Trains for a few steps or without an end, and up to the last one at most; tells of the first."""
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
        trained.touch()
    assert loss.item() < first


if __name__ == "__main__":
    main(int(sys.argv[1]))
