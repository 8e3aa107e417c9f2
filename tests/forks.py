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

import torch.distributed as dist

from bed import run_isolated
from bed.patience import NEVER

HANGS = 60.0
"""Seconds after which a rank leaves its stack and ends with exit code 1: no case takes as long."""


class End(NamedTuple):
    """How a rank ended, and what its body returned, if it did."""

    pid: int
    exitcode: int
    value: Any


def run_forks(body: Callable[..., Any], cases: Iterable[tuple[Any, ...]], world_size: int) -> list[list[End]]:
    """Calls `body(rank, world_size, *case)` in fresh ranks for each case in turn, and waits for their ends.

    Ranks that return live until all have. A rank that raises fails the test.
    """
    __tracebackhide__ = True
    (outcome,) = run_isolated(_run_all, body, [*cases], world_size, backend=None, timeout=NEVER)
    assert outcome.kind == "passed", outcome
    found: list[list[End]] = outcome.value
    return found


def _run_all(rank: int, world_size: int, body: Any, cases: list[tuple[Any, ...]], size: int) -> Any:
    return [_run(body, case, size) for case in cases]


def _run(body: Any, case: tuple[Any, ...], size: int) -> list[End]:
    context = multiprocessing.get_context("fork")
    ranks, links = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            link, far_end = context.Pipe()
            ranks.append(context.Process(target=_live, args=(far_end, rank, size, folder, body, case)))
            ranks[-1].start()
            far_end.close()  # so that a rank's death shows as the end of its link
            links.append(link)
        answers = [_receive(link) for link in links]
        for link in links:
            with contextlib.suppress(OSError):  # its rank has died
                link.send("all have ended")
        for each in ranks:
            each.join()
    for number, (_, failure) in enumerate(answers):
        assert not failure, f"{case}, rank {number}: {failure}"
    return [End(each.pid or 0, each.exitcode or 0, value) for each, (value, _) in zip(ranks, answers)]


def _receive(link: Connection) -> Any:
    try:
        return link.recv()
    except (EOFError, OSError):
        return None, ""


def _live(link: Connection, rank: int, size: int, folder: str, body: Any, case: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, limit = dist.FileStore(f"{folder}/store", size), timedelta(seconds=NEVER)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        link.send((body(rank, size, *case), ""))
    except BaseException:
        link.send((None, traceback.format_exc()))
    link.recv()
