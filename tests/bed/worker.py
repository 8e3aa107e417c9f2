"""A rank process: takes jobs from its connection until that closes."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from bed.job import Job, Outcome, resolve

_PR_SET_PDEATHSIG = 1
_MANY_OBJECTS = 20_000
_SECONDS_OF_LINES = 5.0


def main(connection: Connection, rank: int, log: str, stacks: str) -> None:
    """Serves jobs: answers each with an outcome, and cleans up when told that all ranks have answered."""
    _die_with_pytest()
    _redirect(log, stacks)
    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects
    environment = dict(os.environ)
    ending, lines = _EndingGroups(), _Lines()
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        os.ftruncate(1, 0)
        connection.send(_attempt(job, rank))
        connection.recv()
        connection.send(_clean_up(environment, ending))
        lines.keep()


def _die_with_pytest() -> None:
    """Ends with pytest, however that ends: the fork server ends with pytest, the ranks with it."""
    # The fork server waits for everyone who holds this; a hung rank would keep it, and itself, alive.
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C pytest ends the ranks
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died before the line above
        os._exit(1)


def _redirect(log: str, stacks: str) -> None:
    """Sends all output to ``log``; on SIGUSR1 writes the Python stacks to ``stacks``."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    # The file lives as long as the process: the handler writes to its descriptor.
    faulthandler.register(signal.SIGUSR1, file=os.open(stacks, os.O_WRONLY | os.O_CREAT), all_threads=True)


def _attempt(job: Job, rank: int) -> Outcome:
    try:
        function = resolve(job)
        args, kwargs = pickle.loads(job.payload)
        _prepare(job, rank)
        with warnings.catch_warnings():
            value = function(rank, job.world_size, *args, **kwargs)
        return Outcome(kind="passed", pid=os.getpid(), payload=pickle.dumps(value))
    except pytest.skip.Exception as skip:
        return Outcome(kind="skipped", pid=os.getpid(), headline=str(skip))
    except BaseException as failure:
        return _failed(failure)
    finally:
        sys.stdout.flush()


def _failed(failure: BaseException) -> Outcome:
    frames = failure.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(failure), failure, frames or failure.__traceback__))
    headline = "".join(traceback.format_exception_only(failure)).strip().splitlines()
    return Outcome(kind="failed", pid=os.getpid(), headline=headline[0], text=text)


def _prepare(job: Job, rank: int) -> None:
    os.environ["PYTEST_CURRENT_TEST"] = job.test  # as in pytest's own process, for tools that ask
    torch.manual_seed(job.seed)
    random.seed(job.seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(job.seed)
    if job.backend is None:
        return
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no host name look-ups
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # all ranks are here, and there may be no other network
    # Longer than the job may take: a stuck rank is to be found stuck, with its stack.
    patience = timedelta(seconds=job.longest + 30)
    store = dist.FileStore(job.store, job.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size, timeout=patience)


class _EndingGroups:
    """Lets process groups end beside the next job: gloo's threads look every 10 ms whether they should.

    Else each group would cost 20 ms in which nothing is computed.
    """

    def __init__(self) -> None:
        self._handed: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def leave(self) -> None:
        """Leaves all process groups."""
        groups = list(_world.pg_map)
        dist.destroy_process_group()
        self._handed.put(groups)

    def _run(self) -> None:
        while True:
            groups = self._handed.get()
            while groups:
                groups.pop()  # the last reference: its destructor waits, without the interpreter's lock


def _clean_up(environment: dict[str, str], ending: _EndingGroups) -> Outcome:
    """Undoes the traces of a job in this process."""
    try:
        _forget_meshes()
        if dist.is_initialized():
            ending.leave()
        _reset_torch()
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        _collect()
        _reset_cuda()
        _require_torchs_names()
        return Outcome(kind="passed", pid=os.getpid())
    except BaseException as failure:
        return _failed(failure)


def _require_torchs_names() -> None:
    """Fails a job that leaves torch's FSDP rebound to ours: what later jobs import would hold ours."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is not None and not wrapper.__module__.startswith("torch."):
        raise RuntimeError(
            "this job left the names of torch's FSDP rebound: call fsdp_wrap.compat.uninstall()"
        )


def _forget_meshes() -> None:
    """Empties the caches of `DTensor`s: they hold meshes, and with them process groups and their threads.

    The next job's meshes compare equal to them, so it would find what belongs to groups that are no more.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _collect() -> None:
    """Collects garbage, and passes over the job's imports from now on: they would take 0.2 s a job."""
    gc.collect()
    if len(gc.get_objects()) > _MANY_OBJECTS:
        gc.freeze()


class _Lines:
    """Which lines were run, where that is measured: this rank may be killed in another job."""

    def __init__(self) -> None:
        coverage = sys.modules.get("coverage")
        self._measuring = coverage and coverage.Coverage.current()
        self._kept = time.monotonic()

    def keep(self) -> None:
        """Saves them once in a while, since that takes time."""
        if self._measuring and time.monotonic() - self._kept > _SECONDS_OF_LINES:
            self._measuring.save()
            self._kept = time.monotonic()


def _reset_torch() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)


def _reset_cuda() -> None:
    """Leaves nothing of a job on the GPU, if it used one; a fault of a kernel shows here at the latest."""
    if not torch.cuda.is_initialized():
        return
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()
