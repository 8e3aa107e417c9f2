"""Kills ranks, agents and hosts of a training run at seeded moments, and tells what that cost.

python -m benchmarks.kills [--runs 4] [--events 10] [--steps 500] [--seed 0] [--hosts 2] [--ranks 2]

Runs `examples/elastic.py` under torchrun's elastic agent, one agent for each host that this machine plays; a
host has a folder in memory of its own, and loses it with its processes. What is killed is a trainer rank, an
agent alone, or a host: agent, ranks and memory; what went comes back at once, a host with empty memory. The
table has a line for each kind: how many steps were taken again, and the seconds between the last step before
and the first one after it. The other lines compare the end with a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("rank", "agent", "host")
IN_MEMORY = Path("/dev/shm")
PATIENCE = 120.0

FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For agents: without it, one that joins later waits for a store that the first ones have told each other of
before, and ranks that start anew find the addresses of those that are gone."""


@dataclass(frozen=True)
class Event:
    """One kill and what came of it.

    Attributes:
        kind: What was killed.
        step: The last step before training stopped.
        resumed: The step from which it went on.
        seconds: From the end of the one step to the end of the next one.
        ranks: How many took that one.
    """

    kind: str
    step: int
    resumed: int
    seconds: float
    ranks: int

    @property
    def lost(self) -> int:
        """Steps that were taken again."""
        return self.step - self.resumed


@dataclass
class Host:
    """An agent, its ranks, its memory and its cores; the command starts the agent."""

    command: Sequence[str]
    memory: Path
    log: Path
    cores: Sequence[int]
    agent: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Starts an agent, which starts ranks once all have met."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **FRESH_STORES}
        with self.log.open("ab") as out, self.log.with_suffix(".err").open("ab") as errors:
            self.agent = subprocess.Popen(
                self.command,
                stdout=out,
                stderr=errors,
                env=environment,
                start_new_session=True,
                preexec_fn=self._take_cores,
            )

    def _take_cores(self) -> None:
        os.sched_setaffinity(0, self.cores)

    def ranks(self) -> list[int]:
        """The process ids of the ranks that run now."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                if parent == self.agent.pid and b"\0RANK=" in (stat.parent / "environ").read_bytes():
                    found.append(int(stat.parent.name))
        return sorted(found)

    def lose(self, kind: str, chosen: random.Random) -> None:
        """Kills one rank, the agent, or all with the memory; what is gone is started again."""
        ranks = self.ranks()
        if kind == "rank":
            _kill([chosen.choice(ranks)])
            return
        _kill([self.agent.pid, *(ranks if kind == "host" else ())])
        self.agent.wait()
        if kind == "host":
            shutil.rmtree(self.memory, ignore_errors=True)
        self.start()

    def stop(self) -> None:
        """Ends all of it."""
        ranks = self.ranks()
        if self.agent.poll() is None:
            _kill([self.agent.pid])
            self.agent.wait()
        _kill(ranks)
        shutil.rmtree(self.memory, ignore_errors=True)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Run:
    """A training run on several hosts, followed by what it prints."""

    hosts: list[Host]
    log: Path
    _read: int = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields what the first rank tells, until all agents have ended; waits for more.

        Raises:
            RuntimeError: If nothing comes for long, or an agent failed.
        """
        heard = time.monotonic()
        while True:
            ended = all(host.agent.poll() is not None for host in self.hosts)
            with self.log.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    heard = time.monotonic()
                    if line.startswith(b"{"):
                        yield json.loads(line)
            if ended:
                return
            if time.monotonic() - heard > PATIENCE:
                errors = self.log.with_suffix(".err").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"nothing has gone on for {PATIENCE:.0f} s:\n{errors}")
            time.sleep(0.01)


def launcher(store: dist.TCPStore, hosts: int, ranks: int, last_call: int = 60) -> list[str]:
    """Returns the command of an agent, up to the script.

    Args:
        store: Where agents meet; it outlives them.
        hosts: How many there are at most.
        ranks: Of each.
        last_call: Seconds for which those that have met wait for others.
    """
    flags = (
        f"--nnodes 1:{hosts} --nproc-per-node {ranks} --max-restarts 1000 --monitor-interval 0.1 "
        f"--rdzv-backend c10d --rdzv-id kills --rdzv-endpoint 127.0.0.1:{store.port} "
        f"--rdzv-conf is_host=0,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    return [sys.executable, "-m", "torch.distributed.run", *flags.split()]


def cores_of(number: int, hosts: int) -> list[int]:
    """Returns the share that one of several hosts has of this machine's cores, one at least."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores) :: hosts]


@contextmanager
def run_on(options: argparse.Namespace, memory: Path, disk: Path) -> Iterator[Run]:
    """Starts a run on several hosts, which end with the context."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    training = (
        f"--lose-at-most {options.lose_at_most} --steps {options.steps} --disk {disk} "
        f"--disk-every {options.disk_every} --width {options.width}"
    )
    data = ["--data", str(options.data)] if options.data else []
    script = [str(ROOT / "examples" / "elastic.py"), *training.split(), *data]
    command = [*launcher(store, options.hosts, options.ranks), *script]
    places = [memory / f"host{number}" for number in range(options.hosts)]
    log = disk.parent / f"{disk.name}.log"
    log.touch()
    hosts: list[Host] = []
    try:
        for number, place in enumerate(places):
            cores = cores_of(number, options.hosts)
            hosts.append(Host([*command, "--memory", str(place)], place, log, cores))
        yield Run(hosts, log)
    finally:
        for host in hosts:
            host.stop()


def disturbed(run: Run, steps: int, kinds: Sequence[str], chosen: random.Random) -> tuple[list[Event], float]:
    """Follows a run and kills; returns the events and the loss of the last step.

    Args:
        run: It has been started.
        steps: How many it takes.
        kinds: What is killed, in this order.
        chosen: Draws steps, hosts and ranks.
    """
    moments = sorted(chosen.sample(range(10, steps - 10), len(kinds)))
    events: list[Event] = []
    killed: str | None = None
    resumed: int | None = None  # until the next step
    last: dict[str, Any] = {"step": 0, "time": 0.0, "loss": float("nan")}
    for line in run.lines():
        if "resumed" in line:
            resumed = line["resumed"]
            continue
        if killed is not None and resumed is not None:
            seconds = line["time"] - last["time"]
            events.append(Event(killed, last["step"], resumed, seconds, line["ranks"]))
            print(events[-1], file=sys.stderr, flush=True)
            killed = None
        last, resumed = line, None
        if killed is None and len(events) < len(kinds) and last["step"] >= moments[len(events)]:
            time.sleep(chosen.uniform(0, 0.05))
            killed = kinds[len(events)]
            chosen.choice(run.hosts).lose(killed, chosen)
    if killed is not None:  # an agent went, and the ranks that it left were done before another one came
        events.append(Event(killed, last["step"], last["step"], 0.0, last["ranks"]))
    return events, last["loss"]


def table(events: Sequence[Event]) -> list[str]:
    """Returns the lines of a table in markdown: a row for each kind."""
    lines = [
        "| killed | times | steps taken again: median, most | seconds until training went on: median, most |",
        "|---|---|---|---|",
    ]
    for kind in sorted({event.kind for event in events}):
        of_kind = [event for event in events if event.kind == kind]
        lost = [event.lost for event in of_kind]
        seconds = [event.seconds for event in of_kind]
        lines.append(
            f"| {kind} | {len(of_kind)} | {statistics.median(lost):g}, {max(lost)} | "
            f"{statistics.median(seconds):.1f}, {max(seconds):.1f} |"
        )
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--events", type=int, default=10, help="kills in a run")
    parser.add_argument("--steps", type=int, default=500, help="of a run")
    parser.add_argument("--lose-at-most", type=int, default=5, help="steps that a lost host may cost")
    parser.add_argument("--disk-every", type=int, default=100, help="steps between saves on disk")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--width", type=int, default=64, help="of the model")
    parser.add_argument("--data", type=Path, help="text; Python's own library if left out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    in_memory = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=in_memory) as memory:
        with run_on(options, Path(memory, "none"), Path(disk, "none")) as run:
            _, undisturbed = disturbed(run, options.steps, (), random.Random(0))
        print(f"undisturbed: {undisturbed:.6f} is the loss of step {options.steps}", flush=True)
        events: list[Event] = []
        for number in range(options.seed, options.seed + options.runs):
            chosen = random.Random(number)
            kinds = [KINDS[at % len(KINDS)] for at in range(options.events)]
            chosen.shuffle(kinds)
            with run_on(options, Path(memory, str(number)), Path(disk, str(number))) as run:
                found, loss = disturbed(run, options.steps, kinds, chosen)
            events += found
            apart = abs(loss - undisturbed) / undisturbed
            print(f"seed {number}: {loss:.6f} after {len(found)} kills, {apart:.4%} apart", flush=True)
        print("\n".join(table(events)))


if __name__ == "__main__":
    main()
