"""Several models, each with a process group and a thread of its own, that train at the same time."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fronts import assert_tensors, each_front, full_state, shard
from fsdp_wrap._comm.shared_memory.memory import SharedMemory
from fsdp_wrap.wrap import ModuleWrapPolicy

MODELS, STEPS, WIDTH = 3, 8, 160


def run_in_threads(tasks: Iterable[Callable[[], Any]], apart: float = 0.0) -> list[Any]:
    """Runs each in a thread, which begin some seconds after each other; returns the results."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(number: int, task: Callable[[], Any]) -> None:
        try:
            results[number] = task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(tasks)]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return [results[number] for number in range(len(threads))]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def on_groups(front: str, seeds: Iterable[int]) -> list[nn.Module]:
    """Returns sharded models, each on a group of its own."""
    groups = [dist.new_group() for _ in seeds]
    policy = ModuleWrapPolicy({nn.Linear})
    return [shard(front, net(seed), policy, process_group=group) for seed, group in zip(seeds, groups)]


def loss_of(model: nn.Module, seed: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return model(torch.randn(2, WIDTH, generator=generator)).square().mean()


@each_front
@ranks(2)
def test_models_train_in_threads(rank, world_size, front):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    sharded = on_groups(front, range(MODELS))

    def train(model: nn.Module, seed: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss_of(model, seed, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        run_in_threads([partial(train, model, seed) for seed, model in enumerate(sharded)])
    finally:
        sys.setswitchinterval(before)
    for seed, model in enumerate(sharded):
        plain = net(seed)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            for other in range(world_size):
                (loss_of(plain, seed, other, step) / world_size).backward()
            optimizer.step()
        assert_tensors(full_state(model), plain.state_dict())


@each_front
@ranks(2)
def test_threads_may_communicate_for_the_first_time_in_another_order_on_each_rank(rank, world_size, front):
    seeds = [*range(2)]
    sharded = on_groups(front, seeds)
    tasks = [partial(loss_of, model, seed, rank, 0) for seed, model in enumerate(sharded)]
    losses = [loss.item() for loss in run_in_threads(tasks[:: -1 if rank else 1], apart=0.2)]
    expected = [loss_of(net(seed), seed, rank, 0).item() for seed in seeds]
    assert losses[:: -1 if rank else 1] == pytest.approx(expected)


def test_threads_may_free_pieces_at_the_same_time():
    """A piece is free once its readers have told so, which lets other threads run."""

    def is_read() -> bool:
        time.sleep(0.02)
        return True

    memory = SharedMemory()
    for begin in [memory.take(1) for _ in range(4)]:
        memory.note(begin, is_read)
        memory.give_back(begin)
    begins = run_in_threads([lambda: memory.take(1)] * 3)
    assert len({*begins}) == 3
