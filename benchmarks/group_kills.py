"""Kills replica groups of a training run at seeded moments, and measures the loss of time.

Runs two groups of `examples/replicas.py` by torchft (extra `elastic`). A group that is killed is started
again at once, and the next kill waits until it is back. Counted are the steps that the surviving group took
again, and the seconds between its steps. `benchmarks.kills` is the command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.victims import PATIENCE, ROOT, Event, cores_of, free_port, kill

GROUP = "replica group"
ENDLESS = 1_000_000
GAP = (3, 10)
"""Steps of both groups from one event to the next kill, at least and at most."""

LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer as Server
join, heartbeat = map(int, sys.argv[1:])
times = {"join_timeout_ms": join, "quorum_tick_ms": 20, "heartbeat_timeout_ms": heartbeat}
server = Server(bind="[::]:0", min_replicas=1, **times)
print(server.address(), flush=True)
input()
"""


@contextmanager
def lighthouse(join_ms: int = 500, heartbeat_ms: int = 2000) -> Iterator[str]:
    """Starts what finds out which groups are there; yields its address.

    It says much on standard error, so it is a process of its own.

    Args:
        join_ms: Milliseconds that it waits for further groups.
        heartbeat_ms: Milliseconds of silence after which a group is gone.
    """
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(
        [sys.executable, "-c", LIGHTHOUSE, str(join_ms), str(heartbeat_ms)], text=True, **pipes
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Group:
    """The ranks of a replica group, and the output of the first one.

    Args:
        command: The command of each rank.
        size: How many ranks there are.
        log: The file for their output.
        cores: The cores that they share.
    """

    def __init__(self, command: Sequence[str], size: int, log: Path, cores: Sequence[int]) -> None:
        self.log = log
        self._command, self._size, self._cores = command, size, cores
        self.start()

    def start(self) -> None:
        """Starts all ranks, as torchrun would."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        world = {"WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size, "MASTER_PORT": free_port()}
        common = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}
        common.update({name: str(value) for name, value in world.items()})
        self._ranks = []
        for rank in map(str, range(self._size)):
            with self.log.open("ab") as out, self.log.with_suffix(".err").open("ab") as errors:
                environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
                self._ranks.append(
                    subprocess.Popen(
                        self._command,
                        stdout=out,
                        stderr=errors,
                        env=environment,
                        preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
                    )
                )

    def stop(self) -> None:
        """Kills all ranks."""
        kill([rank.pid for rank in self._ranks if rank.poll() is None])
        self.wait()

    def wait(self) -> None:
        """Waits until all ranks have ended."""
        for rank in self._ranks:
            rank.wait()

    @property
    def ended(self) -> bool:
        """Whether any rank has ended."""
        return any(rank.poll() is not None for rank in self._ranks)


@contextmanager
def groups_of(
    options: argparse.Namespace, folder: Path, steps: int = ENDLESS, step_seconds: float = 0.0
) -> Iterator[list[Group]]:
    """Starts two groups, which end with the context."""
    folder.mkdir()
    training = f"--steps {steps} --width {options.width} --timeout 20 --step-seconds {step_seconds}"
    data = ["--data", str(options.data)] if options.data else []
    groups: list[Group] = []
    with lighthouse() as address:
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        try:
            for number in range(2):
                script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *training.split()]
                command = [sys.executable, *script, *data]
                log, cores = folder / f"group{number}.log", cores_of(number, 2)
                groups.append(Group(command, options.group_ranks, log, cores))
            yield groups
        finally:
            for group in groups:
                group.stop()


def told(group: Group) -> list[dict[str, Any]]:
    """Returns the steps that a group has told so far."""
    lines = group.log.read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for(group: Group, number: int, least_groups: int, after: int = 0) -> dict[str, Any] | None:
    """Waits for a step; returns its line, None if the run ended before.

    Args:
        group: The group that prints it.
        number: The least number of the step.
        least_groups: The least number of groups that took it.
        after: Lines before this one do not count.

    Raises:
        RuntimeError: If nothing comes for long.
    """
    until, seen = time.monotonic() + PATIENCE, 0
    while time.monotonic() < until:
        ended = group.ended
        lines = told(group)
        if len(lines) > seen:
            until, seen = time.monotonic() + PATIENCE, len(lines)
        for line in lines[after:]:
            if line["step"] >= number and line["groups"] >= least_groups:
                return line
        if ended:
            return None
        time.sleep(0.01)
    errors = group.log.with_suffix(".err").read_text(errors="replace")[-3000:]
    raise RuntimeError(f"nothing has gone on for {PATIENCE:.0f} s:\n{errors}")


def disturbed(groups: Sequence[Group], count: int, chosen: random.Random) -> tuple[list[Event], int, float]:
    """Kills a group so many times; returns the events, and number and loss of a step after the last one.

    Raises:
        RuntimeError: If training does not go on, or a group does not come back.
    """
    events: list[Event] = []
    line: dict[str, Any] | None = {"step": 0}
    while line is not None and len(events) < count:
        if wait_for(groups[0], line["step"] + chosen.randint(*GAP), 2) is None:
            break
        time.sleep(chosen.uniform(0, 0.3))
        number = chosen.randrange(2)
        living = groups[1 - number]
        before = len(told(living))
        groups[number].stop()
        groups[number].start()
        after = wait_for(living, 0, 1, before)
        line = wait_for(living, after["step"] + 1, 2, before + 1) if after else None
        if after is None or line is None:
            break
        lines = told(living)
        last, following = lines[before - 1], lines[before - 1 : before + 3]
        seconds = max(b["time"] - a["time"] for a, b in zip(following, following[1:]))
        away = line["time"] - last["time"]
        events.append(Event(GROUP, last["step"], after["step"] - 1, seconds, after["groups"], away))
        print(events[-1], file=sys.stderr, flush=True)
    if len(events) < count:
        raise RuntimeError(f"a group has ended by itself after {len(events)} of {count} kills")
    return events, line["step"], line["loss"]


def undisturbed(options: argparse.Namespace, folder: Path, steps: int) -> float:
    """Returns the loss of the last step of a run that nobody disturbs."""
    with groups_of(options, folder, steps) as groups:
        for group in groups:
            group.wait()
        return float(told(groups[0])[-1]["loss"])
