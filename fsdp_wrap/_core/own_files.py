"""Folders and files under names that other users of the host could have taken first.

In a folder where everybody may write, such as `/dev/shm`, another user can lay a link under a name that this
process is about to use. What is written under that name would then change a file of this user elsewhere. So
no link is followed where a file is opened, new files are new (mode "x" of `open`), and a folder in which
others may exchange entries is refused.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EINVAL)
"""Errors of a place where nothing can be made: of another user's, or of a file system that takes no files."""
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def open_own(path: Path, flags: int, private: bool = False) -> int:
    """Opens a file that may be there, and returns its descriptor.

    Raises a ValueError if it is a link, no file, or has a second name: another user may have put it there.
    `private` asks that nobody else may read it, and refuses a file of another user.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its other end
    try:
        descriptor = os.open(path, flags, 0o600 if private else 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    else:
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() or not private
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and is_own:
            return descriptor
        os.close(descriptor)
    raise ValueError(
        f"{path} is a link, no file, or another user's: what is written there could land in another file. "
        "Nothing was written: see who has put it there, and remove it"
    )


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_unusable(folder: Path) -> None:
    """Raises a ValueError if a folder is none, or cannot be made or written to; leaves nothing there."""
    there = next(path for path in [folder, *folder.parents] if os.path.lexists(path))
    if there.exists() and not there.is_dir():
        raise ValueError(f"{there} is a file, and what is written needs a folder there: name another one")
    probe = there / f".probe.{secrets.token_hex(8)}"
    try:
        probe.mkdir(0o700)
        probe.rmdir()
    except OSError as error:
        if error.errno not in _NO_PLACE:
            return  # such as a full disk: writing tells
        raise ValueError(
            f"{folder} cannot be written to ({error.strerror}, in {there}): name a folder on a file system "
            "where this user may write"
        ) from error


def own_folder(folder: Path, alone: bool = False) -> None:
    """Makes a folder if it is not there; refuses it as `refuse_others` does.

    What is made where everybody may write is this user's alone.
    """
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            path.mkdir(0o700 if alone or _open_to_all(path.parent) else 0o775, exist_ok=True)
            with suppress(OSError):  # of a folder that may not be listed
                sync_folder(path.parent)
    refuse_others(folder, alone)


def refuse_others(folder: Path, alone: bool = False) -> None:
    """Raises a ValueError if others could exchange what is written into a folder.

    Args:
        folder: It is there.
        alone: Whether nobody else may write there at all. Otherwise a group may, and the owner of a folder
            that lies where not everybody could have made one. Where something is mounted, everybody may: a
            volume of a container has one user.
    """
    others = _others_in(folder, alone)
    if others is not None and _tells_users(folder):
        raise ValueError(
            f"{others}: they could exchange what is written in {folder}, or lead it elsewhere by links. "
            "Nothing was written: name a folder that you have made yourself, or take it from them "
            "(chown, chmod go-w)"
        )


def own_output(path: Path) -> Path:
    """Makes the folder of a file that is to be written, and returns the path.

    Raises a ValueError if another user has laid something under that name where everybody may write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if _open_to_all(path.parent) and os.lstat(path).st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"{path} is another user's, and could lead what is written to another file: name another one"
            )
    return path


def _others_in(folder: Path, alone: bool) -> str | None:
    """Returns who else may replace entries of a folder, and why."""
    for path in [folder, *folder.parents] if alone else [folder]:
        owner = os.lstat(path).st_uid
        is_checked = alone and path == folder or _open_to_all(path.parent) and not os.path.ismount(path)
        if is_checked and owner not in (os.geteuid(), 0):
            return f"{path} belongs to another user (id {owner})"
    if alone and folder.is_symlink():
        return f"{folder} is a link, which others may have laid"
    status = os.stat(folder)
    is_open = _open_to_all(folder) and not status.st_mode & stat.S_ISVTX and not os.path.ismount(folder)
    if status.st_mode & _BY_OTHERS if alone else is_open:
        return f"other users may write to {folder} (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _open_to_all(folder: Path) -> bool:
    return bool(os.stat(folder).st_mode & stat.S_IWOTH)


def _tells_users(folder: Path) -> bool:
    """Whether what this user makes for itself in a folder looks so; some network file systems show others."""
    probe = folder / f".probe.{secrets.token_hex(8)}"
    try:
        probe.mkdir(0o700)
    except OSError:
        return True
    try:
        made = os.lstat(probe)
        return made.st_uid == os.geteuid() and not made.st_mode & _BY_OTHERS
    finally:
        with suppress(OSError):
            probe.rmdir()
