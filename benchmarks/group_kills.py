"""Kills replica groups of a training run at seeded moments, and tells what that cost.

python -m benchmarks.group_kills [--events 10] [--steps 500] [--seed 0] [--ranks 2] [--width 192]

Runs two groups of `examples/replicas.py` by torchft (extra `elastic`), each under its own torchrun. A group
that is killed is started again at once, and the next kill waits until it is back. The table tells how many
steps the group that lived took again, and the seconds between its steps. The other lines tell how long a
killed group was away, and compare the end with a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kills import PATIENCE, ROOT, Event, Host, cores_of, table

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
def groups_of(options: argparse.Namespace, folder: Path) -> Iterator[list[Host]]:
    """Starts two groups, which end with the context."""
    folder.mkdir()
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {options.ranks}"
    training = f"--steps {options.steps} --width {options.width} --timeout 20"
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


def disturbed(
    groups: Sequence[Host], moments: Sequence[int], chosen: random.Random
) -> tuple[list[Event], list[float], float]:
    """Kills a group at each of some steps; returns the events, how long each was away, the last loss."""
    events: list[Event] = []
    away: list[float] = []
    for moment in moments:
        if wait_for(groups[0], moment, 2) is None:
            break
        time.sleep(chosen.uniform(0, 0.3))
        number = chosen.randrange(2)
        living = groups[1 - number]
        before = len(told(living))
        groups[number].lose("host", chosen)
        after = wait_for(living, 0, 1, before)
        back = wait_for(living, after["step"] + 1, 2, before + 1) if after else None
        lines = told(living)
        last = lines[before - 1]
        if after is None or back is None:
            break
        seconds = max(b["time"] - a["time"] for a, b in zip(lines[before - 1 :], lines[before : before + 3]))
        events.append(Event("replica group", last["step"], after["step"] - 1, seconds, after["groups"]))
        away.append(back["time"] - last["time"])
        print(events[-1], f"away for {away[-1]:.1f} s", file=sys.stderr, flush=True)
    for group in groups:
        group.agent.wait()
    return events, away, told(groups[0])[-1]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group_kills")
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="of each group")
    parser.add_argument("--width", type=int, default=192, help="of the model")
    parser.add_argument("--data", type=Path, help="text; Python's own library if left out")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    moments = sorted(chosen.sample(range(5, options.steps * 4 // 5), options.events))
    with tempfile.TemporaryDirectory() as folder:
        with groups_of(options, Path(folder, "quiet")) as groups:
            _, _, undisturbed = disturbed(groups, (), chosen)
        print(f"undisturbed: {undisturbed:.6f} is the loss of step {options.steps}", flush=True)
        with groups_of(options, Path(folder, "disturbed")) as groups:
            events, away, loss = disturbed(groups, moments, chosen)
    apart = abs(loss - undisturbed) / undisturbed
    print(f"seed {options.seed}: {loss:.6f} after {len(events)} kills, {apart:.4%} apart")
    print("\n".join(table(events)))
    print(f"a group was away for {statistics.median(away):.1f} s, at most {max(away):.1f} s")


if __name__ == "__main__":
    main()
