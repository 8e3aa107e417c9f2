"""Step folders: names, completeness, and atomic appearance and removal.

A step is written into a hidden folder, which one rename makes visible. A step that is deleted or replaced
is hidden by a rename first. So a crash leaves hidden folders at most, and the next save removes them. One run
at a time saves in a folder: it holds a lock on a file there.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdp_wrap._core import listed, open_own, own_folder, refuse_others, sync_folder, warn_caller
from fsdp_wrap.checkpoint._manifest import (
    MANIFEST,
    METADATA,
    DamagedCheckpoint,
    Fault,
    Manifest,
)

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})(?:\.[0-9a-f]+)?\.(partial|replaced|deleted)")
_LOOKS, _PAUSE = 3, 0.1  # what another host has made is there, unless the file system is slow to show it
_CLAIM, MARK = ".saving", ".rank_"
_LONGEST_OWNER = 400  # bytes of a claim
_held: set[Path] = set()  # a process does not meet its own locks


def steps_in(parent: Path) -> dict[int, Path]:
    """Returns the step folders in a folder by number, newest first, complete or not."""
    folders: dict[int, Path] = {}
    for path in parent.iterdir() if parent.is_dir() else ():
        hidden, name = _HIDDEN.fullmatch(path.name), _STEP.fullmatch(path.name)
        if name and path.is_dir():
            folders[int(name[1])] = path
        elif hidden and hidden[2] == "replaced":  # by a save that crashed before the new one was visible
            folders.setdefault(int(hidden[1][5:]), path)
    return dict(sorted(folders.items(), reverse=True))


def number_of(folder: Path, written: int) -> int:
    """Returns the step number in a folder's name, or else in its manifest."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else written


def is_step(folder: Path) -> bool:
    """Whether a folder has the name of a step's."""
    return _STEP.fullmatch(folder.name) is not None


def lack_of(folder: Path) -> str | None:
    """Returns the first fault of a step folder by names and sizes, None if it is complete."""
    try:
        faults = Manifest.read(folder).missing(folder)
    except DamagedCheckpoint as error:
        return str(error)
    return f"{faults[0].file} {faults[0].lack}" if faults else None


def latest(dir: str | Path) -> Path | None:
    """Returns the folder of the newest complete step in `dir`, None if there is none.

    Complete means: the manifest is intact and all files have their sizes; `load` reads every byte.

    Args:
        dir: The folder with the step folders.
    """
    return next(_complete_in(Path(dir)), None)


def find(path: Path, step: int | None) -> Path:
    """Returns the step folder to load: the path itself, the step asked for, or the newest complete one."""
    if any((path / name).exists() for name in (MANIFEST, METADATA)):
        if step is not None and steps_in(path.parent).get(step) != path:
            raise ValueError(f"step={step} does not fit {path}, which is a step folder itself")
        return path
    steps = steps_in(path)
    if step is not None:
        if step not in steps:
            held = f"steps {listed(steps)}" if steps else "no step folder"
            raise ValueError(f"there is no step {step} in {path}; it holds {held}")
        return steps[step]
    passed: list[str] = []
    for folder in steps.values():
        lack = lack_of(folder)
        if lack is None:
            if passed:
                warn_caller(f"passing over {'; '.join(passed)}")
            return folder
        passed.append(f"{folder}: {lack}")
    lacks = "it holds no step folder" if path.is_dir() else "there is no such folder"
    if path.is_file():
        lacks = "it is a file; name the folder that save was given (torch.load reads the files of torch.save)"
    why = "; ".join(passed) or lacks
    raise ValueError(f"no complete checkpoint in {path}: {why}")


def sum_of_manifest(folder: Path) -> int | str | None:
    """Returns the CRC-32 of a step folder's manifest, None without one, or the error of reading it."""
    try:
        return zlib.crc32((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)


def complete_before(folder: Path) -> Path | None:
    """Returns the newest complete step folder beside another one and older."""
    name = _STEP.fullmatch(folder.name)
    return next(_complete_in(folder.parent, int(name[1])), None) if name else None


def _complete_in(parent: Path, before: float = math.inf) -> Iterator[Path]:
    """Yields the complete step folders in a folder, newest first, that are older than a step."""
    steps = steps_in(parent).items()
    return (folder for step, folder in steps if step < before and lack_of(folder) is None)


@contextmanager
def begun(parent: Path, step: int | None) -> Iterator[tuple[int, str]]:
    """Clears up after crashed saves, makes the hidden folder of a step, and yields its number and name.

    In the end its leftovers are removed, and others may save. All ranks must see a folder of that name.
    """
    own_folder(parent)
    with _claimed(parent):
        _clean_up(parent)
        if step is None:
            step = next(iter(steps_in(parent)), 0) + 1
        final = step_folder(parent, step)
        if os.path.lexists(final) and not (final / MANIFEST).is_file():  # a link to nowhere, too
            raise ValueError(
                f"{final} is in the way and no checkpoint of ours: remove it, or save another step"
            )
        written = parent / f".{final.name}.{secrets.token_hex(4)}.partial"
        written.mkdir()
        try:
            yield step, written.name
        finally:
            with suppress(OSError):  # then the next save removes it
                _remove(written)


def clean_up(parent: Path) -> None:
    """Removes leftovers of crashed saves, unless another process does so or saves."""
    with suppress(RuntimeError, ValueError, OSError), _claimed(parent):
        _clean_up(parent)


def step_folder(parent: Path, step: int) -> Path:
    """Returns the folder of a step, which may not be there."""
    return parent / f"step_{step:08d}"


def shows(folder: Path) -> bool:
    """Whether a folder that another rank has just made is there for this one."""
    parent = folder.parent
    # Listing asks a file server anew.
    return any(parent.is_dir() and os.listdir(parent) and folder.is_dir() for _ in _looks())


def unseen_in(folder: Path) -> list[Fault]:
    """Returns the faults of a written step, as this rank sees it."""
    faults: list[Fault] = []
    for _ in _looks():
        os.listdir(folder)
        faults = Manifest.read(folder).missing(folder)
        if not faults:
            break
    return faults


def _looks() -> Iterator[int]:
    """Counts looks, with pauses, at a folder that another host or rank is about to change."""
    for look in range(_LOOKS):
        time.sleep(_PAUSE * bool(look))
        yield look


def publish(written: Path, step: int, keep_last: int | None) -> None:
    """Makes a written step visible, then removes older complete steps but the last ones."""
    parent = written.parent
    final = step_folder(parent, step)
    sync_folder(written)
    replaced = _hidden(final, "replaced")
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    sync_folder(parent)
    try:
        _remove(replaced)
        if keep_last is not None:
            for older in [*_complete_in(parent, step)][keep_last - 1 :]:
                _remove(older.rename(_hidden(older, "deleted")))
    except OSError as error:  # the new step is there all the same
        warn_caller(f"an old checkpoint in {parent} could not be removed: {error}")


def keep_newest(parent: Path, count: int) -> None:
    """Removes all step folders but the newest ones, complete or not."""
    for older in [*steps_in(parent).values()][count:]:
        _remove(older.rename(_hidden(older, "deleted")))


def remove_steps(parent: Path) -> None:
    """Removes all step folders, leftovers of saves, and the folder itself if it is empty then."""
    if parent.is_dir():
        with _claimed(parent):
            keep_newest(parent, 0)
            _clean_up(parent)
            for mark in parent.glob(f"{MARK}*"):
                mark.unlink()
        with suppress(OSError):
            parent.rmdir()


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one, if it is there."""
    if path.is_symlink():
        path.unlink()
    for look in _looks():  # a rank that has not noticed a failure yet may write one more file
        try:
            if path.exists():
                shutil.rmtree(path)
            return
        except OSError:
            if look == _LOOKS - 1:
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


# where, and who


def place_of(path: Path) -> str:
    """Returns this rank's path and host of a folder, for messages."""
    return f"in {path.absolute()} on host {socket.gethostname()}"


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
