"""Ranks that are threads of this process."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed import multi_threaded_pg

from fsdp_wrap._params import buffers


class _Steps(threading.local):
    """Counts the steps that optimizers take in each thread: a rank must not notice those of others."""

    steps = 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1


@contextmanager
def _steps_by_thread() -> Iterator[None]:
    counter = _Steps()
    hook = register_optimizer_step_post_hook(counter)
    try:
        with mock.patch.object(buffers, "steps_taken", lambda: counter.steps):
            yield
    finally:
        hook.remove()


@contextmanager
def threads_as_ranks(
    world_size: int, backend: str = "threaded"
) -> Iterator[Callable[[Callable[[int], Any]], None]]:
    """Gives a function that runs its argument on every rank, each a thread with process groups of its own."""
    with FakeTensorMode():  # what torch 2.11 sets up in the first goes with its thread: not one of a rank
        pass
    multi_threaded_pg._install_threaded_pg()
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    store = dist.HashStore()

    def run(body: Callable[[int], Any]) -> None:
        errors: list[BaseException] = []

        def thread(rank: int) -> None:
            try:
                dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
                body(rank)
            except BaseException as error:
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
                errors.append(error)

        started = [threading.Thread(target=thread, args=(rank,)) for rank in range(world_size)]
        for worker in started:
            worker.start()
        for worker in started:
            worker.join()
        if errors:
            raise errors[0]

    try:
        # Torch's flight recorder, from 2.15 on, asks groups for names that these have not.
        with _steps_by_thread(), mock.patch.dict(os.environ, TORCH_FR_BUFFER_SIZE="0"):
            yield run
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()
