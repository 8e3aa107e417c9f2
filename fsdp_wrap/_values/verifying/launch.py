"""`Launch`: rank processes of this host that run an errand, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._values.verifying.observe import Errand, Observed, WrongSetup, observe, seed_as_of

_GRACE = 5.0
"""Seconds that other ranks have to end by themselves after one has failed."""


@dataclass(frozen=True)
class Launch:
    """Runs jobs in processes of their own.

    Attributes:
        timeout: Seconds after which a run is given up.
    """

    timeout: float

    def run(self, errand: Errand, ranks: int) -> list[Observed]:
        """Returns what each rank has observed.

        Raises:
            RuntimeError: If a rank fails, or the time is over; it has the rank's traceback.
            TypeError: If `setup` returns another type.
            ValueError: If it returns a model that is sharded and should not be, or the other way around.
        """
        context = _context_for(errand.setup)
        with tempfile.TemporaryDirectory(prefix="fsdp-wrap-verify-") as folder:
            arguments = [
                (rank, ranks, folder, errand, context.get_start_method(), self.timeout)
                for rank in range(ranks)
            ]
            processes = [context.Process(target=_run_rank, args=each) for each in arguments]
            with _ending(processes):
                for process in processes:
                    process.start()
                self._await(processes)
            self._check(processes, Path(folder), errand)
            return [pickle.loads((Path(folder) / f"{rank}.done").read_bytes()) for rank in range(ranks)]

    def _await(self, processes: list[Any]) -> None:
        """Waits until all have ended, or until the grace after a failure is over."""
        end, left = time.monotonic() + self.timeout, [*processes]
        while left and time.monotonic() < end:
            wait([each.sentinel for each in left], max(0.0, end - time.monotonic()))
            if any(each.exitcode for each in processes):
                end = min(end, time.monotonic() + _GRACE)
            left = [each for each in left if each.exitcode is None]

    def _check(self, processes: list[Any], folder: Path, errand: Errand) -> None:
        """Raises the first error of a rank."""
        run = f"the {'sharded' if errand.sharded else 'plain'} run"
        for path in folder.glob("*.wrong"):
            raise pickle.loads(path.read_bytes())
        errors = sorted(folder.glob("*.failed"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise RuntimeError(f"rank {errors[0].stem} has failed in {run}:\n{errors[0].read_text()}")
        for rank, process in enumerate(processes):
            code = process.exitcode
            if (folder / f"{rank}.done").exists():
                continue
            if code > 0 and not (folder / f"{rank}.begun").exists():
                raise RuntimeError(
                    f"rank {rank} could not begin {run} (exit code {code}): its process imports the file of "
                    'setup, so call verify() there under `if __name__ == "__main__":`'
                )
            raise RuntimeError(
                f"rank {rank} has not ended {run} in {self.timeout:g} s, or was killed (exit code {code}): "
                "look whether all ranks run the same collectives, or give a longer timeout"
            )


@contextmanager
def _ending(processes: list[Any]) -> Iterator[None]:
    """Ends what is left of the processes."""
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()


def _context_for(setup: Any) -> Any:
    """Returns the way to start processes that can call a function."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    try:
        pickle.dumps(setup)
        importable = getattr(setup, "__module__", None) != "__main__" or main is not None
    except Exception:
        importable = False
    if importable:
        return multiprocessing.get_context("spawn")
    if "fork" in multiprocessing.get_all_start_methods() and not torch.accelerator.is_available():
        return multiprocessing.get_context("fork")
    raise _not_importable(setup)


def _run_rank(rank: int, ranks: int, folder: str, errand: Errand, start_method: str, timeout: float) -> None:
    """Runs an errand as a rank, and writes what it has observed, or its error."""
    (Path(folder) / f"{rank}.begun").touch()
    try:
        _become(rank, ranks, folder, start_method, timeout)
        if start_method == "fork":
            _require_backward(errand.setup)
        done = pickle.dumps(observe(errand))
        dist.barrier()
        (Path(folder) / f"{rank}.done").write_bytes(done)
    except WrongSetup as wrong:
        (Path(folder) / f"{rank}.wrong").write_bytes(pickle.dumps(wrong.error))
        _end()
    except BaseException:
        written = Path(folder) / f"{rank}.written"
        written.write_text(traceback.format_exc())
        written.rename(written.with_suffix(".failed"))
        _end()
    dist.destroy_process_group()


def _require_backward(setup: Any) -> None:
    """Refuses a fork of a process whose backwards have run in threads: torch runs none in it."""
    try:
        torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
    except RuntimeError as error:
        raise WrongSetup(_not_importable(setup)) from error


def _not_importable(setup: Any) -> ValueError:
    return ValueError(
        f"setup={setup!r} cannot be imported by another process, and forks of this one cannot run it: define "
        "it by `def` at the top of a module, not inside a function"
    )


def _end() -> None:
    """Ends this process at once, without waiting for collectives that others do not enter."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def _become(rank: int, ranks: int, folder: str, start_method: str, timeout: float) -> None:
    """Makes this process a rank, with the variables that torchrun sets."""
    forked = start_method == "fork"  # where OpenMP's threads are gone
    torch.set_num_threads(1 if forked else max(1, (os.cpu_count() or 1) // ranks))
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    seed_as_of(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
