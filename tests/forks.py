"""Ranks that are forks of one process, which has imported all: each is cheap to start, and may be killed."""

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bed import run_isolated
from bed.patience import NEVER

HANGS = 180.0
"""Seconds after which a rank leaves its stack and ends with exit code 1: no case takes as long."""


class End(NamedTuple):
    """How a rank ended, and what its body returned, if it did."""

    pid: int
    exitcode: int
    value: Any


def run_forks(
    body: Callable[..., Any], cases: Iterable[tuple[Any, ...]], world_size: int, together: bool = False
) -> list[list[End]]:
    """Calls `body(rank, world_size, *case)` in fresh ranks for each case, and waits for their ends.

    Ranks that return live until all of their case have. A rank that raises fails the test. The cases run in
    turn, or `together` where they wait more than they compute.
    """
    __tracebackhide__ = True
    rest = (body, [*cases], world_size, together)
    (outcome,) = run_isolated(_run_all, *rest, backend=None, timeout=NEVER)
    assert outcome.kind == "passed", outcome
    ends: list[list[End]] = outcome.value
    return ends


def _run_all(rank: int, world_size: int, body: Any, cases: list[Any], size: int, together: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        if not together:
            return [_Case(body, case, size, f"{folder}/{n}").end() for n, case in enumerate(cases)]
        started = [_Case(body, case, size, f"{folder}/{n}") for n, case in enumerate(cases)]
        return [case.end() for case in started]


class _Case:
    """The ranks of one case, which it starts, and waits for in `end`."""

    def __init__(self, body: Any, case: tuple[Any, ...], size: int, store: str) -> None:
        context = multiprocessing.get_context("fork")
        self._case, self._ranks, self._links = case, [], []
        for rank in range(size):
            link, far_end = context.Pipe()
            args = (far_end, rank, size, store, body, case)
            self._ranks.append(context.Process(target=_live, args=args))
            self._ranks[-1].start()
            far_end.close()  # so that a rank's death shows as the end of its link
            self._links.append(link)

    def end(self) -> list[End]:
        answers = [_receive(link) for link in self._links]
        for link in self._links:
            with contextlib.suppress(OSError):  # its rank has died
                link.send("all have ended")
        for process in self._ranks:
            process.join()
        for number, (_, failure) in enumerate(answers):
            assert not failure, f"{self._case}, rank {number}: {failure}"
        ended = zip(self._ranks, answers)
        return [End(process.pid or 0, process.exitcode or 0, value) for process, (value, _) in ended]


def _receive(link: Connection) -> Any:
    try:
        return link.recv()
    except (EOFError, OSError):
        return None, ""


def _live(link: Connection, rank: int, size: int, path: str, body: Any, case: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # In a fork torch makes its thread pool anew at the next use, which threads of autograd would race for.
    torch.set_num_threads(1)
    store, limit = dist.FileStore(path, size), timedelta(seconds=NEVER)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        link.send((body(rank, size, *case), ""))
    except BaseException:
        link.send((None, traceback.format_exc()))
    link.recv()
