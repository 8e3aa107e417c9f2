"""Processes of a host to kill, the events that follow, and their table."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0
"""Seconds without news after which a run is given up."""

FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For agents: without it, one that joins later waits for a store that the first ones have told each other of
before, and ranks that start anew find the addresses of those that are gone."""


@dataclass(frozen=True)
class Event:
    """One kill and its consequences.

    Attributes:
        kind: The kind of kill.
        step: The last step before training stopped.
        resumed: The step from which it went on.
        seconds: From the end of the one step to the end of the next one.
        ranks: How many ranks took that one.
        away: Seconds until the killed part took part again, where the others went on without it.
    """

    kind: str
    step: int
    resumed: int
    seconds: float
    ranks: int
    away: float | None = None

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
        """Returns the process ids of the ranks that run now."""
        ids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                if parent == self.agent.pid and b"\0RANK=" in (stat.parent / "environ").read_bytes():
                    ids.append(int(stat.parent.name))
        return sorted(ids)

    def lose(self, kind: str, chosen: random.Random) -> None:
        """Kills a "trainer rank", the "agent" alone, or else all of it; what is gone starts again."""
        ranks = self.ranks()
        if kind == "trainer rank":
            kill([chosen.choice(ranks)])
        elif kind == "agent":
            kill([self.agent.pid])
            self.agent.wait()
            self.start()
        else:
            self.lose_all([self])

    @staticmethod
    def lose_all(hosts: Sequence[Host]) -> None:
        """Kills hosts at once, with their memory, and starts them again."""
        kill([pid for host in hosts for pid in (host.agent.pid, *host.ranks())])
        for host in hosts:
            host.agent.wait()
            shutil.rmtree(host.memory, ignore_errors=True)
        for host in hosts:
            host.start()

    def stop(self) -> None:
        """Ends all of it."""
        ranks = self.ranks()
        if self.agent.poll() is None:
            kill([self.agent.pid])
            self.agent.wait()
        kill(ranks)
        shutil.rmtree(self.memory, ignore_errors=True)


def kill(pids: Sequence[int]) -> None:
    """Kills processes, as far as they are there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Returns a port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def cores_of(number: int, hosts: int) -> list[int]:
    """Returns the share that one of several hosts has of this machine's cores, one at least."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number % len(cores) :: hosts]


def table(events: Sequence[Event], goals: Mapping[str, int]) -> list[str]:
    """Returns the lines of a table in markdown: a row for each kind.

    Args:
        events: Events of all kinds.
        goals: How many steps each kind may cost.
    """
    lines = [
        "| killed | times | steps taken again: median, most | goal | seconds until training went on: "
        "median, most | seconds until it was back: median, most |",
        "|---|---|---|---|---|---|",
    ]
    for kind in [kind for kind in goals if any(event.kind == kind for event in events)]:
        of_kind = [event for event in events if event.kind == kind]
        lost, seconds = [event.lost for event in of_kind], [event.seconds for event in of_kind]
        away = [event.away for event in of_kind if event.away is not None]
        back = f"{statistics.median(away):.1f}, {max(away):.1f}" if away else ""
        lines.append(
            f"| {kind} | {len(of_kind)} | {statistics.median(lost):g}, {max(lost)} | {goals[kind]} | "
            f"{statistics.median(seconds):.1f}, {max(seconds):.1f} | {back} |"
        )
    return lines
