"""Two ranks of this host that connect and communicate, for `doctor`.

Each is a process of its own: `python -m fsdp_wrap.tools.command.meeting RANK PORT`, which prints a line of
JSON. Their communicator is the one that the package chooses for them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_wrap._comm import Watch, make_communicator, positions_of, ranks_in
from fsdp_wrap.tools.machines import measure_link

_LIMIT = 60.0  # seconds for all of it
_NOTICED = 5.0  # seconds in which the end of a rank must be seen


@dataclass
class Meeting:
    """The result of two ranks.

    Attributes:
        error: The reason for which they could not communicate; "" if they could.
        way: How they communicate; "" if by the process group's own collectives.
        latency: Seconds of a small gather.
        bandwidth: Bytes a second that a rank receives in large gathers and sums.
        watched: Whether one noticed the end of the other.
    """

    error: str = ""
    way: str = ""
    warnings: list[str] = field(default_factory=list)
    latency: float = 0.0
    bandwidth: float = 0.0
    watched: bool = False


def meet() -> Meeting:
    """Starts two ranks, and returns their result; takes some seconds, mostly to import torch."""
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    except OSError as error:
        return Meeting(error=f"no port of the loopback device 127.0.0.1 can be opened: {error}")
    command = [sys.executable, "-m", "fsdp_wrap.tools.command.meeting"]
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=settings,
        )
        for rank in range(2)
    ]
    return _result_of(ranks)


def _result_of(ranks: list[subprocess.Popen[str]]) -> Meeting:
    """Waits for the ranks, and returns the result of the first one."""
    until = time.monotonic() + _LIMIT
    try:
        out, err = ranks[0].communicate(timeout=_LIMIT)
        ranks[1].communicate(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Meeting(error=f"two ranks of this host did not connect within {_LIMIT:.0f} s")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    with suppress(ValueError, IndexError, TypeError):
        return Meeting(**json.loads(out.splitlines()[-1]))
    lines = err.strip().splitlines() or [f"a rank ended with status {ranks[0].returncode}"]
    return Meeting(error=lines[-1])


def _take_part(rank: int, port: int) -> Meeting:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        limit = timedelta(seconds=_LIMIT / 2)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit
        )
        ranks = ranks_in(dist.group.WORLD)
        communicator = make_communicator(ranks, torch.device("cpu"))
        link = measure_link(communicator, seconds=0.1)
    meeting = Meeting(
        way=communicator.way,
        warnings=sorted({str(warning.message) for warning in caught}),
        latency=link.latency,
        bandwidth=link.bandwidth,
    )
    dist.barrier()
    if rank == 0:
        meeting.watched = _sees_the_end(ranks.group)
    return meeting


def _sees_the_end(group: dist.ProcessGroup) -> bool:
    watch = Watch(group, torch.device("cpu"), positions_of(group))
    until = time.monotonic() + _NOTICED
    while time.monotonic() < until:
        if watch.has_ended(1):
            return True
        time.sleep(0.02)
    return False


def _main(rank: int, port: int) -> None:
    try:
        meeting = _take_part(rank, port)
    except Exception as error:  # any reason that keeps ranks from communicating
        meeting = Meeting(error=f"{type(error).__name__}: {error}".splitlines()[0])
    print(json.dumps(vars(meeting)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # like a lost rank, which closes nothing


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
