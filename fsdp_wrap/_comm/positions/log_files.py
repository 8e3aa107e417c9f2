"""The files in which ranks of a host share their logs: their names, locks, and who removes them.

File names contain a random word that the ranks of a job agree on through the store. A rank that is not in
its group's file runs on another host and is left out. Each rank locks a byte of the file until its process
ends, however it ends: a free lock means a dead rank, or a file to remove. A rank that ends leaves the files
to the living ranks, which may still read them. The last rank to end removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import tempfile
import time
from multiprocessing.util import Finalize, is_exiting
from pathlib import Path

import torch.distributed as dist

from fsdp_wrap._comm.groups import CARRY_NOTHING
from fsdp_wrap._comm.positions.host_log import ENTRY, ROWS, HostLog
from fsdp_wrap._core import open_own, warn_caller
from fsdp_wrap._core.torch_private import default_store

_PREFIX, _SEPARATOR = "fsdp_wrap-", "."  # the separator follows the job's word
_LEFT_OVER_AFTER = 60.0  # seconds in which survivors may still read a killed rank's file


class LogFiles:
    """The files of one job on this host. Where they cannot be, each rank has logs for itself, with a warning.

    There are none without other ranks, nor for ranks in threads, which share the locks of their process.
    """

    def __init__(self) -> None:
        self._directory, self._word = _directory(), secrets.token_hex(8)
        self._enabled = dist.get_backend() not in (*CARRY_NOTHING, "threaded")
        try:
            if self._enabled:
                self._word = _agree(self._word)
                _remove_left_overs(self._directory)
        except (OSError, RuntimeError) as error:
            self._disable(error)

    def open(self, name: str, rank: int, ranks: int) -> HostLog:
        """Opens the log of a group, whose ranks all pass the same name, and no other group's."""
        if self._enabled:
            digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
            try:
                return open_log(self._directory / f"{_PREFIX}{self._word}{_SEPARATOR}{digest}", rank, ranks)
            except OSError as error:
                self._disable(error)
        return HostLog.unshared(rank, ranks)

    def _disable(self, error: Exception) -> None:
        self._enabled = False
        warn_caller(
            f"ranks cannot show each other where they stand ({error}): units that are mixed up between ranks "
            "will not be noticed, and a failure will not be reported with the positions of all ranks"
        )


def _directory() -> Path:
    shared = Path("/dev/shm")  # in memory: writes never wait for a disk
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _agree(proposal: str) -> str:
    """Agrees on a word across ranks; another one after torch.distributed was initialised anew."""
    store = default_store()
    if store is None:
        raise RuntimeError("the default process group has no store")
    turn = store.add(f"fsdp_wrap/turn/{dist.get_rank()}", 1)  # a store may outlive its group
    return store.compare_set(f"fsdp_wrap/word/{turn}", "", proposal).decode()


def open_log(path: Path, rank: int, ranks: int) -> HostLog:
    """Opens a host's file, which its last user removes; raises an OSError if that fails."""
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT, private=True)
    except ValueError as error:
        raise OSError(str(error)) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        # Lack of space raises here, not as SIGBUS later. Each rank allocates its own entries.
        os.posix_fallocate(descriptor, 0, 8 * ROWS * ranks)
        os.posix_fallocate(descriptor, HostLog.entries_of(rank, ranks), ROWS * ENTRY.size)
        os.posix_fallocate(descriptor, HostLog.nbytes(ranks) - 1, 1)
        log = HostLog(mmap.mmap(descriptor, HostLog.nbytes(ranks)), rank, ranks, descriptor)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        _remove_if_abandoned(path)
        raise OSError(f"cannot write {path}: {error}") from error
    # Unlike atexit, also runs in children of multiprocessing, and not in forks.
    Finalize(log, _give_up, args=(path, descriptor), exitpriority=0)
    return log


def _give_up(path: Path, descriptor: int) -> None:
    os.close(descriptor)  # releases the lock
    if is_exiting():  # other ranks of the job may still read it
        _remove_if_abandoned(*path.parent.glob(f"{path.name.partition(_SEPARATOR)[0]}{_SEPARATOR}*"))
    else:
        _remove_if_abandoned(path)


def _remove_if_abandoned(*files: Path) -> None:
    """Removes files if all of them are abandoned."""
    if all(map(_abandoned, files)):
        for file in files:
            file.unlink(missing_ok=True)


def _abandoned(path: Path) -> bool:
    """Whether no other process holds a lock of a file."""
    try:
        file = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _remove_left_overs(directory: Path) -> None:
    """Removes files of killed ranks."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            status = path.lstat()
            is_old = time.time() - status.st_mtime > _LEFT_OVER_AFTER
            if status.st_uid == os.geteuid() and is_old and _abandoned(path):
                path.unlink()
