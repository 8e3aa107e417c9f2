"""Files of a step in a store, read from there, or from copies in a folder on this host's disk.

A copy appears under its name once all of it is there with the manifest's sums. Locks on files of the folder
let one process of a host make each copy, and keep copies from being removed while a load reads them. The
system ends these locks with their process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedIOBase, FileIO
from pathlib import Path
from typing import IO, Any

from fsdp_wrap._core import open_own, own_folder, warn_caller
from fsdp_wrap.checkpoint._manifest import ByteRange, Manifest, torn
from fsdp_wrap.checkpoint._places.remote import RemotePath

_LOCK = ".lock"
_MOST_OPEN = 16
_CHUNK = 2**23  # bytes: as many as one request to a store brings


class Torn(Exception):
    """The bytes of a file are not those that were written."""


class SummedRange(BufferedIOBase):
    """The bytes of a file's range, read in order; the last of them come only if all have the right sum.

    Raises:
        Torn: If they have another sum, or the file is shorter.
    """

    def __init__(self, file: IO[bytes], piece: ByteRange) -> None:
        file.seek(piece.offset)
        self._file: Any = file
        self._expected, self._left, self._crc = piece.crc, piece.length, 0

    def read(self, size: int | None = -1) -> bytes:
        """Returns so many bytes, or as many as are left."""
        data = bytearray(self._left if size is None or size < 0 else min(size, self._left))
        self.readinto(data)
        return bytes(data)

    def readinto(self, memory: Any) -> int:
        """Fills memory as far as there are bytes left."""
        view = memoryview(memory).cast("B")[: self._left]
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + _CHUNK])
            if not count:
                raise Torn
            self._crc = zlib.crc32(view[done : done + count], self._crc)
            done += count
        self._left -= done
        if not self._left and self._crc != self._expected:
            raise Torn
        return done

    def chunks(self) -> Iterator[memoryview]:
        """Yields the remaining bytes, a few MB at once; each chunk reuses the memory of the one before."""
        memory = memoryview(bytearray(min(self._left, _CHUNK)))
        while self._left:
            yield memory[: self.readinto(memory)]


class StoredFiles:
    """The files of a step, read from its store."""

    def __init__(self, folder: RemotePath) -> None:
        self.folder = folder

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading."""
        file: IO[bytes] = (self.folder / name).open("rb", buffering=0)
        return file

    def take(self, names: Sequence[str], rank: int, size: int) -> None:
        """Prepares for reading files; the ranks of a host divide the work."""

    def is_renewed(self, name: str) -> bool:
        """Whether a file in which damage was met may be sound if it is opened anew."""
        return False

    def close(self, is_loaded: bool) -> None:
        """Says that reading has ended, and whether all of it was sound."""


class OpenFiles(StoredFiles):
    """The files of a step, read from its store; some stay open, each with its last bytes in memory."""

    def __init__(self, folder: RemotePath) -> None:
        super().__init__(folder)
        self._files: dict[str, IO[bytes]] = {}  # the one that was used last is last

    def open(self, name: str) -> IO[bytes]:
        """Opens a file, or returns the one that is open, in a context that leaves it so."""
        file = self._files.pop(name, None) or super().open(name)
        self._files[name] = file
        if len(self._files) > _MOST_OPEN:
            del self._files[next(iter(self._files))]
        return nullcontext(file)  # type: ignore[return-value]  # used as a context alone


class CachedFiles(StoredFiles):
    """The files of a step by copies in a cache folder, each made when it is first wanted.

    The last load that uses the folder removes, when it ends, the copies of other steps of its place. So the
    folder holds one step of each place, and those that are being loaded.

    Raises:
        ValueError: If the cache folder is not safe from others, or takes no locks.
    """

    def __init__(self, folder: RemotePath, manifest: Manifest, cache: Path) -> None:
        super().__init__(folder)
        self._manifest, self._cache = manifest, cache
        self._place = cache / _name_of(folder.parent)
        self._copies = self._place / f"{folder.name}.{manifest.crc:08x}"
        self._is_refused = False  # by the disk
        own_folder(cache)
        self._use = _lock_file(cache / _LOCK)
        _lock(self._use, cache, fcntl.LOCK_SH)
        own_folder(self._copies)

    def open(self, name: str) -> IO[bytes]:
        with self._one_at_a_time(name):
            if self._is_there(name) or self._copied(name):
                return (self._copies / name).open("rb", buffering=0)
        return super().open(name)

    def take(self, names: Sequence[str], rank: int, size: int) -> None:
        """Copies what nobody else is copying; each rank begins elsewhere, so that they seldom wait."""
        begin = rank * len(names) // size
        for name in [*names[begin:], *names[:begin]]:
            try:
                with self._one_at_a_time(name, fcntl.LOCK_NB):
                    if not self._is_there(name):
                        self._copied(name)
            except BlockingIOError:
                continue
            except OSError:  # which reading meets too, and tells
                return

    def is_renewed(self, name: str) -> bool:
        """Removes a damaged copy, if another process has not; then the next `open` makes a new one."""
        copy = self._copies / name
        with self._one_at_a_time(name):
            if copy.exists() and self._is_torn(copy):
                copy.unlink()
        return True

    def close(self, is_loaded: bool) -> None:
        with self._use, suppress(OSError):
            if is_loaded:  # else an earlier step may be wanted next
                fcntl.flock(self._use, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another load goes on
                for other in self._place.iterdir():
                    if other != self._copies:
                        shutil.rmtree(other, ignore_errors=True)

    @contextmanager
    def _one_at_a_time(self, name: str, how: int = 0) -> Iterator[None]:
        with _lock_file(self._copies / f".{name}{_LOCK}") as file:
            _lock(file, self._cache, fcntl.LOCK_EX | how)
            yield

    def _is_there(self, name: str) -> bool:
        """Whether there is a copy of the right size; whoever reads it compares sums."""
        with suppress(OSError):
            return (self._copies / name).stat().st_size == self._manifest.size_of(name)
        return False

    def _is_torn(self, copy: Path) -> bool:
        try:
            with copy.open("rb", buffering=0) as file:
                return any(torn(file, self._manifest.pieces_of(copy.name)))
        except OSError:
            return True

    def _copied(self, name: str) -> bool:
        """Copies a file; False if the store's is damaged or the disk refuses it, and nothing is left then."""
        if self._is_refused:
            return False
        partial = self._copies / f".{name}.partial"
        try:
            with super().open(name) as source:
                self._write(partial, source, name)
            return True
        except Torn:  # reading it from the store tells where
            return False
        except _Refused as refused:
            self._is_refused = True
            warn_caller(
                f"{self._cache} takes no copy of {self.folder / name} ({refused}), which is read from the "
                "store: free some space, or name another cache"
            )
            return False
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _write(self, partial: Path, source: IO[bytes], name: str) -> None:
        with _refusals():
            partial.unlink(missing_ok=True)  # of a process that was killed
            out = partial.open("xb", buffering=0)
        with out:
            for piece in self._manifest.pieces_of(name):
                for chunk in SummedRange(source, piece).chunks():
                    with _refusals():
                        _write_all(out, chunk)
        with _refusals():
            partial.replace(self._copies / name)


class _Refused(Exception):
    """The disk of a cache refused an operation."""


def _write_all(out: FileIO, data: memoryview) -> None:
    while data:
        data = data[out.write(data) :]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Refused(str(error)) from error


def _name_of(place: RemotePath) -> str:
    """Returns the name of a place's folder in a cache, which people can tell from others."""
    told = re.sub(r"[^\w-]", "_", place.name)[-40:]
    return f"{told}.{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"


def _lock_file(path: Path) -> IO[bytes]:
    return os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)


def _lock(file: IO[bytes], cache: Path, how: int) -> None:
    """Locks a file until it is closed."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ValueError(
            f"{cache} takes no file locks ({error}), by which ranks share a cache: name a folder on this "
            "host's own disk"
        ) from error
