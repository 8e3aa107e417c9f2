"""An accelerator that exists in name only: streams and events over tensors in the CPU's memory.

Ranks are threads. The package runs the code that it runs on an accelerator. The simulation objects where two
operators touch the same bytes and no event orders them, and does everything again in other orders.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bed.accelerator.group import BACKEND, SimulatedGroup
from bed.accelerator.replay import Different, replay
from bed.accelerator.simulation import Simulation, simulations
from bed.threads import threads_as_ranks
from fsdp_wrap._building import over_replicas
from fsdp_wrap._comm.positions.host_log import HostLog
from fsdp_wrap._core import steps_taken

__all__ = ["Different", "Simulation", "replay", "run_simulated", "simulations"]


def run_simulated(
    size: int, body: Callable[[int, Simulation], Any], records: bool = False, seeds: int = 2
) -> list[Simulation]:
    """Runs `body` on some ranks, each a thread with an accelerator of its own; fails at any objection.

    Args:
        size: How many ranks.
        body: Gets the rank and its accelerator. Memory that is alive at the end, its result included, is
            compared between orders.
        records: Whether all is done again in other orders, `seeds` of them random.
    """
    with _one_thread():  # the ranks are threads already
        return _run(size, body, records, seeds)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes in one thread, then in as many as before: the bits of later tests depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _steps_by_rank() -> Iterator[None]:
    """Lets each rank count its own optimizers' steps: ranks are processes elsewhere."""
    taken = threading.local()

    def note(*_: Any) -> None:
        taken.steps = steps_of_rank() + 1

    def steps_of_rank() -> int:
        return getattr(taken, "steps", 0)

    assert over_replicas.filled is not None or not find_spec("fsdp_wrap._state_over_replicas")
    users = [module for name, module in sys.modules.items() if name.startswith("fsdp_wrap.")]
    counting = register_optimizer_step_post_hook(note)
    with ExitStack() as patches:
        for user in users:
            if getattr(user, "steps_taken", None) is steps_taken:
                patches.enter_context(mock.patch.object(user, "steps_taken", steps_of_rank))
        yield
    counting.remove()


def _run(size: int, body: Callable[[int, Simulation], Any], records: bool, seeds: int) -> list[Simulation]:
    all_ranks, kept = [Simulation(records) for _ in range(size)], []

    def rank_body(rank: int) -> None:
        with all_ranks[rank].use():
            kept.append(body(rank, all_ranks[rank]))

    SimulatedGroup._meetings.clear()
    SimulatedGroup._arrivals.clear()
    alive = mock.patch.object(HostLog, "lives", lambda *_: True)  # threads share what a process locks
    with simulations(), alive, _steps_by_rank(), threads_as_ranks(size, BACKEND) as run:
        run(rank_body)
    faults = [f"rank {rank}: {fault}" for rank, one in enumerate(all_ranks) for fault in one.faults]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    if records:
        replay([one.recording for one in all_ranks if one.recording is not None], seeds)
        for one in all_ranks:
            one.recording = None  # it has graphs whose hooks lead back here, which no collector sees
    return all_ranks
