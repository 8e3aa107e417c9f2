"""Step folders: names, completeness, and atomic appearance and removal.

A step is written into a hidden folder, which one rename makes visible. A step that is deleted or replaced
is hidden by a rename first. So a crash leaves hidden folders at most, and the next save removes them. One run
at a time saves in a folder: it holds a lock on a file there.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_wrap._core import (
    open_own,
    own_folder,
    refuse_others,
    refuse_unusable,
    sync_folder,
    warn_caller,
)
from fsdp_wrap.checkpoint._manifest import DRAFT, MANIFEST
from fsdp_wrap.checkpoint._places.place import LOOKS, StepPlace, looks

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})(?:\.[0-9a-f]+)?\.(partial|replaced|deleted)")
_CLAIM, MARK = ".saving", ".rank_"
_LONGEST_OWNER = 400  # bytes of a claim
_held: set[Path] = set()  # a process does not meet its own locks


class Folder(StepPlace):
    """A folder of steps on disk, or in the memory of a host."""

    names = _STEP
    path: Path

    def refuse_unusable(self) -> None:
        refuse_unusable(self.path)

    def steps(self) -> dict[int, Path]:
        folders: dict[int, Path] = {}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            hidden, name = _HIDDEN.fullmatch(path.name), _STEP.fullmatch(path.name)
            if name and path.is_dir():
                folders[int(name[1])] = path
            elif hidden and hidden[2] == "replaced":  # by a save that crashed before the new one was visible
                folders.setdefault(int(hidden[1][5:]), path)
        return dict(sorted(folders.items(), reverse=True))

    @contextmanager
    def begun(self, step: int | None) -> Iterator[tuple[int, str]]:
        own_folder(self.path)
        with _claimed(self.path):
            _clean_up(self.path)
            if step is None:
                step = next(iter(self.steps()), 0) + 1
            final = self.step_folder(step)
            if os.path.lexists(final) and not (final / MANIFEST).is_file():  # a link to nowhere, too
                raise ValueError(
                    f"{final} is in the way and no checkpoint of ours: remove it, or save another step"
                )
            written = self.path / f".{final.name}.{secrets.token_hex(4)}.partial"
            written.mkdir()
            try:
                yield step, written.name
            finally:
                with suppress(OSError):  # then the next save removes it
                    _remove(written)

    def step_folder(self, step: int) -> Path:
        """Returns the folder of a step, which may not be there."""
        return self.path / f"step_{step:08d}"

    def shows(self, name: str) -> bool:
        # Listing asks a file server anew.
        return any(
            self.path.is_dir() and os.listdir(self.path) and (self.path / name).is_dir() for _ in looks()
        )

    def show(self, name: str, step: int) -> Path:
        written, final = self.path / name, self.step_folder(step)
        (written / DRAFT).rename(written / MANIFEST)
        sync_folder(written)
        if final.exists():
            final.rename(_hidden(final, "replaced"))
        written.rename(final)
        sync_folder(self.path)
        return final

    def remove_replaced(self, folder: Path, step: int) -> None:
        _remove(_hidden(folder, "replaced"))

    def remove(self, folder: Path) -> None:
        _remove(folder.rename(_hidden(folder, "deleted")))

    def clean_up(self) -> None:
        with suppress(RuntimeError, ValueError, OSError), _claimed(self.path):
            _clean_up(self.path)

    def keep_newest(self, count: int) -> None:
        """Removes all step folders but the newest ones, complete or not."""
        for older in [*self.steps().values()][count:]:
            self.remove(older)

    def clear(self) -> None:
        """Removes all step folders, leftovers of saves, and the folder itself if it is empty then."""
        if self.path.is_dir():
            with _claimed(self.path):
                self.keep_newest(0)
                _clean_up(self.path)
                for mark in self.path.glob(f"{MARK}*"):
                    mark.unlink()
            with suppress(OSError):
                self.path.rmdir()


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one, if it is there."""
    if path.is_symlink():
        path.unlink()
    for look in looks():  # a rank that has not noticed a failure yet may write one more file
        try:
            if path.exists():
                shutil.rmtree(path)
            return
        except OSError:
            if look == LOOKS - 1:
                raise


def _clean_up(parent: Path) -> None:
    """Removes leftovers of crashed saves in a folder of steps that this process has claimed."""
    for path in list(parent.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden and hidden[2] == "replaced" and not os.path.lexists(parent / hidden[1]):
            path.rename(parent / hidden[1])
        elif hidden:
            _remove(path)


def _hidden(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


# who


@contextmanager
def _claimed(parent: Path) -> Iterator[None]:
    """Claims a folder for saving, by a lock that ends with the process; refuses if another run has it."""
    refuse_others(parent)
    path = parent.resolve() / _CLAIM
    if path in _held:
        raise _refusal(parent, "this very process")
    with _locked(path) as file:
        _held.add(path)
        try:
            with suppress(OSError):  # where no space is left: the step's files fail by their names
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on host {socket.gethostname()}".encode())
            yield
        finally:
            with suppress(OSError):  # without its lock it keeps nobody from saving
                path.unlink()
            _held.discard(path)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Locks a file, which is made if it is not there, until it is closed."""
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.pread(file, _LONGEST_OWNER, 0).decode(errors="replace")
                raise _refusal(path.parent, owner or "another process") from None
            except OSError as error:
                warn_caller(
                    f"{path.parent} takes no file locks ({error}): two runs that save there at the same time "
                    "would not notice each other"
                )
            if _is_there(path, file):  # and was not removed by its last owner meanwhile
                yield file
                return
        finally:
            os.close(file)


def _refusal(parent: Path, owner: str) -> RuntimeError:
    return RuntimeError(
        f"another save is going on in {parent}, by {owner}, and nothing was changed: let one run at a time "
        "save in a folder, each run in its own"
    )


def _is_there(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False
