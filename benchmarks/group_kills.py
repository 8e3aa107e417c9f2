"""Kills replica groups of a training run at seeded moments, and tells what that cost.

Runs two groups of `examples/replicas.py` by torchft (extra `elastic`), each under its own torchrun. A group
that is killed is started again at once, and the next kill waits until it is back. What counts is the group
that lived: how many steps it took again, and the seconds between its steps. `benchmarks.kills` is the
command.
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

from benchmarks.victims import PATIENCE, ROOT, Event, Host, cores_of

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


@contextmanager
def groups_of(
    options: argparse.Namespace, folder: Path, steps: int = ENDLESS, step_seconds: float = 0.0
) -> Iterator[list[Host]]:
    """Starts two groups, which end with the context."""
    folder.mkdir()
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {options.ranks}"
    training = f"--steps {steps} --width {options.width} --timeout 20 --step-seconds {step_seconds}"
    data = ["--data", str(options.data)] if options.data else []
    groups: list[Host] = []
    with lighthouse() as address:
        os.environ["TORCHFT_LIGHTHOUSE"] = address
        try:
            for number in range(2):
                script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *training.split()]
                command = [sys.executable, *launcher.split(), *script, *data]
                log, cores = folder / f"group{number}.log", cores_of(number, 2)
                groups.append(Host(command, folder / f"memory{number}", log, cores))
            yield groups
        finally:
            for group in groups:
                group.stop()


def told(group: Host) -> list[dict[str, Any]]:
    """Returns the steps that a group has told so far."""
    lines = group.log.read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for(group: Host, number: int, least_groups: int, after: int = 0) -> dict[str, Any] | None:
    """Waits for a step; returns its line, None if the run ended before.

    Args:
        group: Which tells it.
        number: Of the step, at least.
        least_groups: How many groups took it, at least.
        after: Lines before this one do not count.

    Raises:
        RuntimeError: If nothing comes for long.
    """
    until, seen = time.monotonic() + PATIENCE, 0
    while time.monotonic() < until:
        ended = group.agent.poll() is not None
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


def disturbed(groups: Sequence[Host], count: int, chosen: random.Random) -> tuple[list[Event], int, float]:
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
        groups[number].lose(GROUP, chosen)
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
            group.agent.wait()
        return float(told(groups[0])[-1]["loss"])
