"""Ranks that are killed, or stop, wherever they are: the others name them, and nothing is left."""

import contextlib
import ctypes
import os
import random
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as store

from bed.patience import NEVER
from forks import run_forks
from fronts import shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import (
    ShardingStrategy,
    StateDictType,
    checkpoint,
    iter_full_params,
    set_gradients_in_place,
)
from fsdp_wrap._comm.positions import log_files
from fsdp_wrap._comm.shared_memory.channel import Channel, Kind
from fsdp_wrap._comm.watching import watch as _watch
from fsdp_wrap._core import UNIT_ATTR
from fsdp_wrap._params.parallel import to_local
from fsdp_wrap.distributed_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from fsdp_wrap.wrap import ModuleWrapPolicy


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


M_MMAP_THRESHOLD = -3

TIME_LIMIT = 3.0
"""Seconds after which a rank that stopped is given up, by this package: gloo's limit comes long after."""


class Chain(nn.Module):
    def __init__(self, width):
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8), nn.Tanh()))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def wrapped(width, **options):
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({nn.Sequential})
    return FSDP(Chain(width), auto_wrap_policy=policy, use_orig_params=True, **options)


class End(NamedTuple):
    """How a rank ends, killed or stopped, in a unit's forward or backward of an iteration."""

    act: Callable[[], None]
    victim: int
    phase: str
    unit: str
    iteration: int


def unit_of(model):
    return vars(model)[UNIT_ATTR]


def act_in(model, end):
    calls: list[None] = []

    def hook(*_):
        calls.append(None)
        if len(calls) == end.iteration:
            end.act()

    inner = getattr(model.module, end.unit).module
    if end.phase == "forward":
        inner[0].register_forward_hook(hook)
    else:
        inner[0].register_full_backward_hook(hook)


def stop():
    """Stays where it is until the other one has been told, and ends then."""
    store().wait(["told"], timedelta(seconds=NEVER))
    os._exit(0)


def run_until(rank, world_size, end, strategy, way, width):
    """Trains until a rank is killed or stops; returns what another one is told."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "1" if way == "shared" else "0"
    if way in ("plain", "exchange"):  # small tensors go at once by themselves
        os.environ["FSDP_WRAP_GLOO"] = way
    if end.act is not kill:
        _watch.time_limit = lambda *_: timedelta(seconds=TIME_LIMIT)
    model = wrapped(width, sharding_strategy=ShardingStrategy[strategy])
    if rank == end.victim:
        act_in(model, end)
    with warnings.catch_warnings(record=True) as told, pytest.raises(RuntimeError) as caught:
        warnings.simplefilter("always")
        for _ in range(end.iteration + 1):
            model(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
    store().set("told", "")
    return str(caught.value), str(caught.value.__cause__), [str(warning.message) for warning in told]


def survivors(world_size, *cases, together=False):
    """Returns, for each case, what ranks were told that were neither killed nor stopped."""
    survived = []
    for (end, *_), ends in zip(cases, run_forks(run_until, cases, world_size, together)):
        expected = -signal.SIGKILL if end.act is kill else 0
        assert [outcome.exitcode for outcome in ends] == [
            expected * (r == end.victim) for r in range(world_size)
        ]
        survived.append([outcome.value for number, outcome in enumerate(ends) if number != end.victim])
    return survived


KILLS = [
    ("plain", "forward", "a", 1),  # before its peers have looked
    ("plain", "forward", "b", 2),
    ("exchange", "backward", "c", 2),
    ("at once", "backward", "a", 2),
    ("shared", "forward", "b", 2),
    ("shared", "backward", "c", 2),
]


def test_killed_rank():
    cases = [(End(kill, 1, *where[1:]), "FULL_SHARD", where[0], 8) for where in KILLS]
    for (_, phase, unit, iteration), ((error, cause, _),) in zip(KILLS, survivors(2, *cases)):
        assert f"rank 1 (dead): in or after unit '{unit}' ({phase} of iteration {iteration})" in error
        assert "rank 0 (this one): in or after unit" in error
        if error.startswith("a collective failed: "):
            assert cause in error
        else:
            assert error.startswith("a collective cannot complete without rank 1\n")


def test_stopped_rank():
    ways = [("plain", "forward"), ("exchange", "backward"), ("at once", "forward"), ("shared", "backward")]
    cases = [(End(stop, 1, phase, "b", 2), "FULL_SHARD", way, 8) for way, phase in ways]
    for (_, phase), ((error, _, warned),) in zip(ways, survivors(2, *cases, together=True)):
        for text in (error, *warned):
            assert f"the group's time limit is {TIME_LIMIT} s" in text
            assert f"rank 1 (alive): in or after unit 'b' ({phase} of iteration 2)" in text
        assert len(warned) == 1


def give_up(rank, world_size, way, front, batched, in_place):
    """The first rank gives up a reduction, and drops its gradients; the other one comes late.

    Memory of that size goes back to the system when it is freed: it could not be sent any more.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "0"
    if way == "exchange":
        os.environ["FSDP_WRAP_GLOO"] = way
    _watch.time_limit = lambda *_: timedelta(seconds=TIME_LIMIT)
    policy = ModuleWrapPolicy({nn.Sequential} if batched else set())
    model = shard(front, Chain(2048), policy, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    set_gradients_in_place(model, in_place)
    x, expected = torch.ones(2, 8), []
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
        expected = [to_local(param.grad) for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    loss = model(x).sum()
    if rank == 0:
        with pytest.raises(RuntimeError, match="has not completed"):
            loss.backward()
        with pytest.raises(RuntimeError, match="has not completed"):
            model(x)  # which drops what the backward has left, before it waits
        store().set("dropped", "")
        return not any(plan.fits() for plan in unit_of(model).step.queue._reductions.values())
    store().wait(["dropped"], timedelta(seconds=NEVER))
    loss.backward()
    grads = [to_local(param.grad) for param in model.parameters() if param.grad is not None]
    return [*map(torch.Tensor.tolist, grads)] == [*map(torch.Tensor.tolist, expected)]


def test_a_late_rank_gets_what_another_has_sent_before_it_gave_up():
    cases = [
        ("at once", "orig", False, False),
        ("exchange", "composable", False, False),
        ("at once", "composable", True, False),
        ("exchange", "orig", True, False),
        ("at once", "composable", False, True),
        ("exchange", "orig", False, True),
    ]
    for case, ends in zip(cases, run_forks(give_up, cases, 2, together=True)):
        assert [end.value for end in ends] == [True, True], case


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_kills(world_size):
    """Half of the kills come amid large messages."""
    cases = []
    for seed in range(6):
        draw = random.Random(10 * world_size + seed)
        victim, phase = draw.randrange(world_size), draw.choice(["forward", "backward"])
        end = End(kill, victim, phase, draw.choice("abc"), draw.choice([1, 2, 9]))
        strategy = draw.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
        way = draw.choice(["plain", "exchange", "at once", "shared"])
        cases.append((end, strategy, way, 100_000 if seed % 2 else 8))
    for (end, *_), reports in zip(cases, survivors(world_size, *cases)):
        where = f"unit '{end.unit}' ({end.phase} of iteration {end.iteration})"
        assert all(f"rank {end.victim} (dead): in or after {where}" in error for error, *_ in reports), end


PHASES = {name: getattr(Channel, name) for name in ("post", "arrived", "read", "release")}
COLLECTIVES = ("COMMON_GATHER", "REDUCE_SCATTER", "ALL_REDUCE")
"""In the last of these all ranks wait for all: it is the barrier of a step."""

FIRST = [(rank, phase) for rank in range(3) for phase in (*COLLECTIVES, "between steps")]
"""Each rank in each phase of a step; what comes after these trials is drawn."""


@pytest.mark.slow
@pytest.mark.parametrize("trials", [range(24), range(24, 48)], ids=str)
def test_a_killed_rank_is_noticed_and_no_file_or_process_is_left(tmp_path, trials):
    """Each rank in each phase of a step, and any at any time; without a kill all train on."""
    plans = {trial: plan_of(trial) for trial in trials}
    for trial in plans:
        for name in ("positions", "temporary"):
            (tmp_path / str(trial) / name).mkdir(parents=True)
    cases = [(*plan, tmp_path / str(trial)) for trial, plan in plans.items()]
    for (trial, (victims, plan)), ends in zip(plans.items(), run_forks(survive, cases, world_size=3)):
        told = (trial, plan, victims, ends)
        if plan[0] in PHASES:  # ranks call as often or not: of two, either may notice first
            victims = [victim for victim in victims if ends[victim].exitcode == -signal.SIGKILL] or victims
        for rank, end in enumerate(ends):
            assert end.exitcode == (-signal.SIGKILL if rank in victims else 0), told
            assert rank in victims or ("rank" in end.value) == bool(victims), told
            with pytest.raises(ProcessLookupError):  # neither it nor what it has started
                os.killpg(end.pid, 0)
        names = sorted(path.name for path in (tmp_path / str(trial) / "temporary").iterdir())
        assert not [name for name in names if not name.startswith("torchinductor_")], (names, told)


def plan_of(trial: int) -> tuple[list[int], tuple[str, int]]:
    """Who dies in a trial, where and when; one of every few trials is without a kill."""
    if trial < len(FIRST):
        return [FIRST[trial][0]], (FIRST[trial][1], 4)
    draw = random.Random(trial)
    victims = draw.sample(range(3), draw.choice([1, 1, 1, 2])) if trial % 6 else []
    return victims, (draw.choice([*PHASES, "between steps", "at any time"]), draw.randrange(1, 60))


def survive(rank: int, world_size: int, victims: list[int], plan: tuple[str, int], folder: Path) -> str:
    """Trains until it dies or somebody has died, and returns what it was told then."""
    os.setpgid(0, 0)
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "1"  # also where all other tests run over gloo
    tempfile.tempdir = str(folder / "temporary")
    log_files._directory = lambda: folder / "positions"  # whose files a later job removes
    phase, number = plan
    dies = rank in victims
    if dies and phase in PHASES:
        die_in(phase, number)
    elif dies and phase in COLLECTIVES:
        die_in("post", number, Kind[phase])
    told = ""
    try:
        train(10**9 if victims else 5, plan if dies else ("never", 0))
    except RuntimeError as error:
        told = str(error)
    assert not named_files()
    return told


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

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= kind is None or kind in args
        if not left[0]:
            kill()
        return PHASES[phase](*args, **kwargs)

    setattr(Channel, phase, deadly)


def train(steps: int, plan: tuple[str, int]) -> None:
    """Trains, and dies between steps or at any time if that is the plan."""
    model = wrapped(1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        if plan[0] == "between steps" and step == 1 + plan[1] // 6:
            kill()
        if plan[0] == "at any time" and step == 1:
            threading.Timer(plan[1] / 60, kill).start()
        loss = (model(torch.ones(4, 8)) - 1).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def local(model: nn.Module) -> Any:
    if not isinstance(model, FSDP):
        return model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


CALLS: dict[str, Callable[..., object]] = {
    "save": lambda model, optim, path: checkpoint.save(path, model, optim),
    "async_save": lambda model, optim, path: checkpoint.async_save(path, model, optim).result(),
    "load": lambda model, optim, path: checkpoint.load(path, model, optim),
    "get_model": lambda model, optim, path: get_model_state_dict(model, options=FULL),
    "get_optimizer": lambda model, optim, path: get_optimizer_state_dict(model, optim, options=FULL),
    "set_model": lambda model, optim, state: set_model_state_dict(model, state, options=FROM_FIRST),
    "set_optimizer": lambda model, optim, state: set_optimizer_state_dict(
        model, optim, state, options=FROM_FIRST
    ),
    "full_tensor": lambda model, optim, path: [value.full_tensor() for value in local(model).values()],
    "iter_full_params": lambda model, optim, path: list(iter_full_params(model)),
}


def die_before(rank: int, world_size: int, front: str, shared: str, call: str, path: Path) -> str:
    """The last rank is killed before the call; returns what another one is told."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = shared
    model = shard(front, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state: Any = path / front
    if call == "load":
        checkpoint.save(state, model, optim)
    elif call == "set_model":
        state = get_model_state_dict(model, options=FULL)
    elif call == "set_optimizer":
        state = get_optimizer_state_dict(model, optim, options=FULL)
    if rank == world_size - 1:
        kill()
    with pytest.raises(RuntimeError) as failed:
        CALLS[call](model, optim, state)
    return str(failed.value)


NAMES = {
    "get_model": "get_model_state_dict",
    "get_optimizer": "get_optimizer_state_dict",
    "iter_full_params": "iter_full_params",
}
CASES = {
    "orig": ("0", ["load", "get_optimizer", "set_model"]),
    "flat": ("1", [*CALLS]),
    "composable": ("1", ["save", "load", "get_model"]),
}


@pytest.mark.parametrize(
    "front", ["orig", *(pytest.param(front, marks=pytest.mark.slow) for front in ("flat", "composable"))]
)
def test_a_rank_that_died_is_named(tmp_path, front):
    shared, calls = CASES[front]
    cases = [(front, shared, call, tmp_path / call) for call in calls]
    for call, (survivor, killed) in zip(calls, run_forks(die_before, cases, world_size=2)):
        assert (survivor.exitcode, killed.exitcode) == (0, -signal.SIGKILL), call
        told = survivor.value.splitlines()
        assert "a collective failed: " in told[0], call
        if call in ("save", "async_save", "load"):
            assert told[0].startswith(f"checkpoint.{call} failed, since rank 1 died: ")
        if call in NAMES:
            assert f"in {NAMES[call]}(), which all ranks must call: " in told[0], told[0]
        assert told[1] == "Where the ranks stand:"
        assert told[3].startswith("  rank 1 (dead): in or after the root unit ("), told
