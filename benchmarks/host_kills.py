"""Kills ranks, agents and hosts of a training run at seeded moments, and measures the loss of time.

Runs `examples/elastic.py` under torchrun's elastic agent, one agent for each host that this machine plays; a
host has a folder in memory of its own, and loses it with its processes. Killed are a trainer rank, an agent
alone, a host (agent, ranks and memory), or all hosts at once, so that only the disk is left. The killed part
comes back at once, a host with empty memory. `benchmarks.kills` is the command.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.victims import PATIENCE, ROOT, Event, Host, cores_of

RANK, AGENT, HOST, ALL_HOSTS = "trainer rank", "agent", "host", "all hosts"
KINDS = (RANK, AGENT, HOST, ALL_HOSTS)
GAP = (5, 15)
"""Steps from one event to the next kill, at least and at most."""

MARGIN = 10
"""Steps at the end in which nothing is killed."""


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
        store: The address where agents meet; it outlives them.
        hosts: How many hosts there are at most.
        ranks: Ranks per host.
        last_call: Seconds for which present agents wait for others.
    """
    flags = (
        f"--nnodes 1:{hosts} --nproc-per-node {ranks} --max-restarts 1000 --monitor-interval 0.1 "
        f"--rdzv-backend c10d --rdzv-id kills --rdzv-endpoint 127.0.0.1:{store.port} "
        f"--rdzv-conf is_host=0,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=3"
    )
    return [sys.executable, "-m", "torch.distributed.run", *flags.split()]


@contextmanager
def run_on(
    options: argparse.Namespace, memory: Path, disk: Path, step_seconds: float = 0.0, keeps: bool = True
) -> Iterator[Run]:
    """Starts a run on several hosts, which end with the context.

    Args:
        options: Options of the command line.
        memory: The folder of the hosts' memories.
        disk: The folder that all hosts share.
        step_seconds: Seconds that a step takes beside the computation.
        keeps: Whether steps are kept in memory and on disk, as is needed where anything is killed.
    """
    seldom = options.steps
    copies, saves = (options.lose_at_most, options.disk_every) if keeps else (seldom, seldom)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    training = (
        f"--lose-at-most {copies} --steps {options.steps} --disk {disk} --disk-every {saves} "
        f"--width {options.width} --step-seconds {step_seconds}"
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

    If the steps come to their end before the kinds do, the other kinds are left out.

    Args:
        run: The started run.
        steps: How many steps it takes.
        kinds: Kinds of kills, in this order.
        chosen: Draws steps, hosts and ranks.
    """
    events: list[Event] = []
    killed: str | None = None
    resumed: int | None = None  # until the next step
    moment = 2 + chosen.randint(*GAP)
    last: dict[str, Any] = {"step": 0, "time": 0.0, "loss": float("nan")}
    for line in run.lines():
        if "resumed" in line:
            resumed = line["resumed"]
            continue
        if killed is not None and resumed is not None:
            seconds = line["time"] - last["time"]
            events.append(Event(killed, last["step"], resumed, seconds, line["ranks"]))
            print(events[-1], file=sys.stderr, flush=True)
            killed, moment = None, last["step"] + chosen.randint(*GAP)
        last, resumed = line, None
        if killed is None and len(events) < len(kinds) and moment <= last["step"] <= steps - MARGIN:
            time.sleep(chosen.uniform(0, 0.05))
            killed = kinds[len(events)]
            _lose(run, killed, chosen)
    if killed is not None:  # an agent went, and the ranks that it left were done before another one came
        events.append(Event(killed, last["step"], last["step"], 0.0, last["ranks"]))
    return events, last["loss"]


def _lose(run: Run, kind: str, chosen: random.Random) -> None:
    if kind == ALL_HOSTS:
        Host.lose_all(run.hosts)
    else:
        chosen.choice(run.hosts).lose(kind, chosen)
