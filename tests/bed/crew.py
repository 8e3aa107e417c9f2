"""A crew of rank processes: starting it, giving it jobs, and finding out what became of each rank."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

from bed import worker
from bed.job import Job, Outcome
from bed.patience import NEVER, Patience

_PRELOADED = [
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "pytest",
]
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_CLEAN_UP_LIMIT = 20.0
_LEAVE_LIMIT = 10.0
"""Seconds that ranks without a job have to leave by themselves, as a measuring of coverage needs."""
_STACK_LIMIT = 20.0
_OUTPUT_TAIL = 6000
_MOST_THREADS = 150
"""Threads of a rank beyond which the crew is renewed: those of gloo wake up every 10 ms, and slow tests."""


def warm_up() -> None:
    """Begins to start the fork server, without waiting: it imports torch once for all ranks."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, _ONE_THREAD):
        forkserver.ensure_running()


@dataclass(frozen=True)
class _Member:
    """One rank process, seen from pytest."""

    rank: int
    process: ForkServerProcess
    link: connection.Connection
    log: Path
    stacks: Path

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    @classmethod
    def start(cls, rank: int, folder: Path) -> "_Member":
        context = multiprocessing.get_context("forkserver")
        link, far_end = context.Pipe()
        log, stacks = folder / f"rank{rank}.log", folder / f"rank{rank}.stacks"
        process = context.Process(target=worker.main, args=(far_end, rank, str(log), str(stacks)))
        process.start()
        far_end.close()  # so that the rank's death shows as the end of the link
        return cls(rank, process, link, log, stacks)

    @property
    def threads(self) -> int:
        """How many threads it has, where the system tells."""
        tasks = Path(f"/proc/{self.pid}/task")
        return len(os.listdir(tasks)) if tasks.is_dir() else 0

    def send(self, message: Job | str) -> None:
        with contextlib.suppress(OSError):  # it died meanwhile: receive() will say how
            self.link.send(message)

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = self.link.recv()
        except (EOFError, OSError):
            return self.died()
        return replace(outcome, output=self._output())

    def died(self) -> Outcome:
        self.process.join(NEVER)
        code = self.process.exitcode
        how = "closed its link" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return Outcome(kind="died", pid=self.pid, headline=how, exitcode=code, output=self._output())

    def interrupt(self, what: str) -> Outcome:
        """Returns the stack of a rank that did not answer."""
        if not self.process.is_alive():
            return self.died()
        stack = self._stack()
        return Outcome(kind="hung", pid=self.pid, headline=what, text=stack, output=self._output())

    def _stack(self) -> str:
        if not self.stacks.exists():  # the signal would kill it
            return "(it had not yet come to take jobs)"
        os.kill(self.pid, signal.SIGUSR1)
        limit, size = time.monotonic() + _STACK_LIMIT, -1
        while size != (now := self.stacks.stat().st_size) or (not now and time.monotonic() < limit):
            size = now
            time.sleep(0.05)  # the dump is written piece by piece
        return self.stacks.read_text(errors="replace") or "(it does not even answer signals)"

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.link.close()

    def _output(self) -> str:
        return self.log.read_text(errors="replace")[-_OUTPUT_TAIL:] if self.log.exists() else ""


class Crew:
    """Rank processes that stay up from job to job until one does not pass. Started as they are needed."""

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._folder: Path | None = None
        self._jobs = 0

    def run(self, job: Job, grace: float) -> list[Outcome]:
        """Runs ``job`` on the first ranks. Once one did not pass, the others have ``grace`` seconds."""
        if any(member.threads > _MOST_THREADS for member in self._members):
            self.dismiss()
        folder = self._grow(job.world_size)
        self._jobs += 1
        members = self._members[: job.world_size]
        try:
            for member in members:
                member.send(replace(job, store=str(folder / f"store{self._jobs}")))
            outcomes = self._gather(members, Patience(job.timeout, job.longest), grace)
            if _completed(outcomes):
                outcomes = self._clean_up(members, outcomes)
        except BaseException:  # Ctrl-C, say: nobody knows what the ranks are doing
            self.close()
            raise
        if not _completed(outcomes):
            self.close()
        return outcomes

    def dismiss(self) -> None:
        """Lets the ranks leave by themselves; those that do not are ended."""
        for member in self._members:
            member.link.close()  # which tells that there is no job any more
        deadline = time.monotonic() + _LEAVE_LIMIT
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
        self.close()

    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""
        for member in self._members:
            member.kill()
        self._members.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _grow(self, size: int) -> Path:
        warm_up()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        while len(self._members) < size:
            self._members.append(_Member.start(len(self._members), self._folder))
        return self._folder

    def _clean_up(self, members: list[_Member], outcomes: list[Outcome]) -> list[Outcome]:
        """Lets the ranks leave the job's group, now that none needs another any more."""
        for member in members:
            member.send("all ranks are done")
        cleaned = self._gather(members, Patience(_CLEAN_UP_LIMIT, NEVER), grace=1.0)
        if _completed(cleaned):
            return outcomes
        return [replace(outcome, headline=f"after the test: {outcome.headline}") for outcome in cleaned]

    def _gather(self, members: list[_Member], patience: Patience, grace: float) -> list[Outcome]:
        """Returns one outcome of each member, asked for or found out."""
        outcomes: dict[int, Outcome] = {}
        while missing := {member.link: member for member in members if member.rank not in outcomes}:
            ready = connection.wait(list(missing), patience.pause)
            if not ready and patience.has_ended(member.pid for member in missing.values()):
                break
            for link in ready:
                member = missing[link]  # type: ignore[index]
                outcome = outcomes[member.rank] = member.receive()
                if outcome.kind != "passed":
                    patience.shorten(grace)
        why = str(patience)
        for member in missing.values():
            outcomes[member.rank] = member.interrupt(why)
        return [outcomes[member.rank] for member in members]


def _completed(outcomes: Iterable[Outcome]) -> bool:
    return all(outcome.kind in ("passed", "skipped") for outcome in outcomes)
