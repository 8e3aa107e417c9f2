"""`launch`: rank processes of this host that run an errand, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._values.verifying.observe import Errand, Observed, WrongSetup, observe, seed_as_of

_BEGUN = "begun"
_GRACE = 5.0
"""Seconds that a rank has to end by itself, once it tells nothing more."""


def launch(errand: Errand, ranks: int, timeout: float) -> list[Observed]:
    """Runs an errand in processes of its own; returns what each rank has observed.

    Raises:
        RuntimeError: If a rank fails, or `timeout` seconds are over; it has the rank's traceback.
        TypeError: If `setup` returns another type.
        ValueError: If it returns a model that is sharded and should not be, or the other way around.
    """
    context = _context_for(errand.setup)
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-wrap-verify-"))
        processes: dict[Connection, Any] = {}
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            place = (rank, ranks, f"{folder}/store", timeout)
            args = (errand, writer, context.get_start_method() == "fork", place)
            processes[reader] = context.Process(target=_run_rank, args=args)
            processes[reader].start()
            undo.callback(_end, processes[reader])
            writer.close()  # so that the end of a process is read as the end of its pipe
        observed = _collect(processes, errand, timeout)
        for process in processes.values():
            process.join(_GRACE)
        return observed


def _collect(processes: Mapping[Connection, Any], errand: Errand, timeout: float) -> list[Observed]:
    """Returns what the ranks report, in their order; raises the first error that one of them reports."""
    end = time.monotonic() + timeout
    begun, observed = set[Connection](), dict[Connection, Observed]()
    while len(observed) < len(processes):
        waiting = [reader for reader in processes if reader not in observed]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        for reader in [candidate for candidate in waiting if candidate in ready] or waiting[:1]:
            told = _next_of(reader)
            if isinstance(told, Observed):
                observed[reader] = told
            elif told == _BEGUN:
                begun.add(reader)
            elif told is not None:
                raise told
            else:
                processes[reader].join(_GRACE if ready else 0)
                _end(processes[reader])
                code, rank = processes[reader].exitcode, [*processes].index(reader)
                if code > 0 and reader not in begun:
                    raise RuntimeError(
                        f"rank {rank} could not begin {_run_of(errand)} (exit code {code}): its process "
                        "imports the file of setup, so call verify() there under "
                        '`if __name__ == "__main__":`'
                    )
                raise RuntimeError(
                    f"rank {rank} has not ended {_run_of(errand)} in {timeout:g} s, or was killed (exit "
                    f"code {code}): look whether all ranks run the same collectives, or give a longer "
                    "timeout"
                )
    return [observed[reader] for reader in processes]


def _next_of(reader: Connection) -> Any:
    """Returns what a rank tells next; None if it has ended, or tells nothing."""
    try:
        return pickle.loads(reader.recv_bytes()) if reader.poll() else None
    except EOFError:
        return None


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _run_of(errand: Errand) -> str:
    return f"the {'sharded' if errand.sharded else 'plain'} run"


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


def _run_rank(errand: Errand, writer: Connection, forked: bool, place: tuple[int, int, str, float]) -> None:
    """Runs an errand as a rank, and tells what it has observed, or its error."""

    def tell(what: object) -> None:
        writer.send_bytes(pickle.dumps(what))  # `send` would share the memory of tensors

    tell(_BEGUN)
    try:
        _become(*place, forked)
        if forked:
            _require_backward(errand.setup)
        observed = observe(errand)
        dist.barrier()
        tell(observed)
    except WrongSetup as wrong:
        tell(wrong.error)
    except BaseException:
        failed = f"rank {place[0]} has failed in {_run_of(errand)}:\n{traceback.format_exc()}"
        tell(RuntimeError(failed))
    else:
        dist.destroy_process_group()
        return
    time.sleep(place[-1])  # until it is killed: if it ended, other ranks would tell that they have lost it


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


def _become(rank: int, ranks: int, store: str, timeout: float, forked: bool) -> None:
    """Makes this process a rank, with the variables that torchrun sets."""
    # OpenMP's threads are gone in a fork.
    torch.set_num_threads(1 if forked else max(1, (os.cpu_count() or 1) // ranks))
    for name, number in (("RANK", rank), ("WORLD_SIZE", ranks)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(number)
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    seed_as_of(rank)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit
    )
