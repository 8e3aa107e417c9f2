"""One run at a time saves in a folder: it holds a locked file there, which the next one meets."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from pathlib import Path

__all__ = ["Claim", "host"]

_NAME = ".saving"
_held: set[Path] = set()  # a process does not meet its own locks


def host() -> str:
    """Returns the name of this host, as messages tell it."""
    return socket.gethostname()


class Claim:
    """The right to save in a folder; it ends with `release`, or with the process in whatever way."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, parent: Path) -> Claim:
        """Takes it for this process.

        Raises:
            RuntimeError: If another run, or another thread, is saving there; it names it.
        """
        path = parent.resolve() / _NAME
        if path in _held:
            raise RuntimeError(_refusal(parent, "this very process"))
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(parent, path, descriptor)
                if _is_there(path, descriptor):  # and was not removed by its last owner meanwhile
                    break
                os.close(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on host {host()}".encode(), 0)
        _held.add(path)
        return cls(path, descriptor)

    def release(self) -> None:
        """Gives it up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)  # and with it the lock
        _held.discard(self._path)


def _lock(parent: Path, path: Path, descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = path.read_text(errors="replace") if path.exists() else ""
        raise RuntimeError(_refusal(parent, owner or "another process")) from None
    except OSError as error:
        warnings.warn(
            f"{parent} takes no file locks ({error}): two runs that save there at the same time would not "
            "notice each other",
            stacklevel=2,
        )


def _refusal(parent: Path, owner: str) -> str:
    return (
        f"another save is going on in {parent}, by {owner}, and nothing was changed: let one run at a time "
        "save in a folder, each run in its own"
    )


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
