"""Objects in a store, reached by fsspec, with the methods of `pathlib.Path` that checkpoints use.

Every request is tried again for a while. Reads and writes hold one part of an object in memory at a time.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_WAITS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each new try
_LONGEST = 120.0  # seconds after which nothing is tried anew
_SURE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_PART = 8 << 20  # bytes in memory; stores that cut objects into parts want 5 MiB at least
_AHEAD = 1 << 20  # bytes that a read of few bytes fetches
_MANY_PARTS = 2048  # after so many they grow: S3 takes 10,000 of an object
_CURES = {"s3": "fsdp-wrap[storage]", "s3a": "fsdp-wrap[storage]", "gs": "gcsfs", "hf": "huggingface_hub"}


class _Size(NamedTuple):
    st_size: int


# For type checkers it is whatever `Path` is, so that what takes or returns paths has one type.
_Any: Any = object


class RemotePath(_Any):  # type: ignore[misc]
    """A place in an object store, by its URL, such as `s3://bucket/runs/lm`.

    It has the methods of `pathlib.Path` that read, and `str` gives the URL. A folder is there while an object
    lies below it. How the store is reached, fsspec takes from the environment and its configuration.

    Raises:
        ImportError: If a package for this kind of store is not installed.
        ValueError: If fsspec knows no such kind of store.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._size: int | None = None  # as a listing has told it
        self._opened()

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: RemotePath) -> bool:
        return self._url < other._url

    def __reduce__(self) -> Any:
        import fsspec  # type: ignore[import-untyped]

        configuration = fsspec.config.conf.get(self.kind, {})
        return _made, (self._url, self.kind, configuration, fsspec.get_filesystem_class(self.kind))

    @property
    def kind(self) -> str:
        """What stands before `://`."""
        return self._url.partition("://")[0]

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}" if name else self._url)

    @property
    def name(self) -> str:
        """What stands behind the last slash."""
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot on."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder of this place; a bucket is its own."""
        above = self._url.rpartition("/")[0]
        return self if above.endswith(("/", ":")) else RemotePath(above)

    def absolute(self) -> RemotePath:
        """Returns the same place."""
        return self

    resolve = absolute

    # looking

    def iterdir(self) -> Iterator[RemotePath]:
        """Yields what lies in a folder, with sizes, by one listing."""
        for entry in self.tried(lambda store, key: _listed(store, key)):
            path = self / entry["name"].rstrip("/").rpartition("/")[2]
            path._size = entry["size"] if entry["type"] == "file" else None
            yield path

    def is_dir(self) -> bool:
        """Whether an object lies below."""
        try:
            return next(self.iterdir(), None) is not None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_file(self) -> bool:
        """Whether it is an object."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def exists(self) -> bool:
        """Whether it is an object, or one lies below."""
        return self.is_file() or self.is_dir()

    def stat(self) -> _Size:
        """Returns the size of an object."""
        if self._size is not None:
            return _Size(self._size)
        entry = self.tried(lambda store, key: store.info(key))
        if entry["type"] != "file":
            raise FileNotFoundError(f"{self} is no object")
        return _Size(entry["size"])

    # reading and writing

    def read_bytes(self) -> bytes:
        """Returns an object."""
        return self.tried(lambda store, key: bytes(store.cat_file(key)))

    def write_bytes(self, data: bytes | bytearray) -> None:
        """Writes an object by one request: the old one is there, or all of the new one."""
        self.tried(lambda store, key: store.pipe_file(key, bytes(data)))

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Opens an object: for reading, or a new one, which is there once it is closed without an error."""
        if mode == "xb":
            return _Upload(self)
        return _Download(self) if buffering == 0 else io.BufferedReader(_Download(self))

    def read_range(self, start: int, stop: int) -> bytes:
        """Returns some bytes of an object."""
        return self.tried(lambda store, key: bytes(store.cat_file(key, start=start, end=stop)))

    def rename(self, other: RemotePath) -> None:
        """Removes a small object, and then writes it anew under another name, as the last request."""
        data = self.read_bytes()
        self.unlink()
        other.write_bytes(data)

    def unlink(self) -> None:
        """Removes an object, if it is there."""
        with suppress(FileNotFoundError):
            self.tried(lambda store, key: store.rm_file(key))

    def remove(self) -> None:
        """Removes all that lies below."""
        with suppress(FileNotFoundError):
            self.tried(_remove_below)

    def drop_uploads(self, begin: str) -> None:
        """Gives up what a process that was killed has begun to upload below, under names that begin so.

        S3 keeps the parts otherwise, and nobody sees them. One that may not list them keeps them.
        """
        with suppress(OSError):
            self.tried(lambda store, key: _drop_uploads(store, f"{key}/{begin}"))

    # the store

    def begun(self, part: int) -> Any:
        """Returns fsspec's file for a new object, of parts of a size."""
        store, key = self._opened()
        return store.open(key, "wb", block_size=part)

    def tried(self, do: Callable[[Any, str], T]) -> T:
        """Calls a function with the file system and the key, again if it fails; returns its result.

        What is sure, as that an object is not there, is raised at once; else an OSError in the end.
        """
        try:
            return _again(lambda: do(*self._opened()), _WAITS, Exception)
        except _SURE as error:
            raise type(error)(f"{self}: {error}") from error
        except Exception as error:  # each file system has errors of its own
            raise _failure(self, error) from error

    def _opened(self) -> tuple[Any, str]:
        """Returns the file system, which fsspec keeps for each thread and process, and the key there."""
        try:
            import fsspec

            return fsspec.core.url_to_fs(self._url, use_listings_cache=False)  # type: ignore[no-any-return]
        except ImportError as error:
            cure = _CURES.get(self.kind, "fsdp-wrap[storage]")
            raise ImportError(
                f"{self} needs a package that is not installed ({error}): pip install '{cure}'"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{self} cannot be opened ({error}): name a folder by its path, or a URL of a kind that "
                "fsspec knows, such as s3://, gs:// or hf://"
            ) from error


def persistently(path: Path, write: Callable[[], T]) -> T:
    """Returns what a function returns that writes below a path; in a store it is called anew if it fails."""
    return _again(write, _WAITS[-2:], OSError) if isinstance(path, RemotePath) else write()


def _again(do: Callable[[], T], waits: Sequence[float], kind: type[Exception]) -> T:
    """Calls a function until it raises no error of a kind; the last error is raised."""
    begin = time.monotonic()
    for wait in waits:
        try:
            return do()
        except _SURE:
            raise
        except kind:
            if time.monotonic() - begin > _LONGEST:
                raise
        time.sleep(wait * random.uniform(0.5, 1.0))
    return do()


def _made(url: str, kind: str, configuration: dict[str, Any], files: type[Any]) -> RemotePath:
    """Returns a place in another process, which gets what this one has registered and configured."""
    import fsspec

    fsspec.register_implementation(kind, files, clobber=True)
    fsspec.config.conf[kind] = {**configuration, **fsspec.config.conf.get(kind, {})}
    return RemotePath(url)


def _failure(path: RemotePath, error: Exception) -> OSError:
    return OSError(f"{path}: {type(error).__name__}: {error}")


def _listed(store: Any, key: str) -> list[Any]:
    """Returns what a file system lists in a folder, but for the folder itself."""
    store.invalidate_cache()
    return [entry for entry in store.ls(key, detail=True) if entry["name"].strip("/") != key.strip("/")]


def _remove_below(store: Any, key: str) -> None:
    store.invalidate_cache()
    if keys := store.find(key):
        store.rm(keys)


def _drop_uploads(store: Any, begin: str) -> None:
    uploads = getattr(store, "list_multipart_uploads", None)  # of S3 alone
    bucket = begin.partition("/")[0]
    for upload in uploads(bucket) if uploads is not None else ():
        if f"{bucket}/{upload['Key']}".startswith(begin):
            store.abort_mpu(bucket, upload["Key"], upload["UploadId"])


class PartNotSent(OSError):
    """A part could not be sent, and the store has nothing of it."""


class _Upload(io.RawIOBase):
    """A new object, sent part by part, with one in memory; a small one is sent as a whole when closed."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._held, self._sent = path, bytearray(), 0
        self._file: Any = None
        self._is_dropped = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._sent + len(self._held)

    def write(self, data: Any) -> int:
        """Takes bytes, and sends the parts that are full."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PART):
            self._held += view[start : start + _PART]
            if len(self._held) >= max(_PART, self._sent // _MANY_PARTS):
                self._send()
        return len(view)

    def _send(self) -> None:
        """Sends the held bytes; tries again as long as the store has taken none of them."""
        if self._file is None:
            _again(self._begin, _WAITS, OSError)
        else:
            try:
                self._asked(lambda: self._file.write(self._held))
            except PartNotSent:
                _again(lambda: self._asked(self._file.flush), _WAITS, PartNotSent)
        self._sent += len(self._held)
        self._held = bytearray()

    def _begin(self) -> None:
        try:
            self._file = self._asked(lambda: self._path.begun(_PART))
            self._asked(lambda: self._file.write(self._held))
        except BaseException:
            self._give_up()
            raise

    def close(self) -> None:
        """Lets the object appear."""
        if self.closed:
            return
        try:
            if self._is_dropped:
                return
            if self._file is None:
                self._path.write_bytes(self._held)
            else:
                self._send()
                try:
                    self._asked(self._file.close)
                except PartNotSent:
                    _again(lambda: self._asked(self._close_anew), _WAITS, PartNotSent)
                self._file = None
        except BaseException:
            self._drop()
            raise
        finally:
            super().close()

    def __exit__(self, kind: Any, *details: Any) -> None:
        if kind is not None:
            self._drop()
        self.close()

    def __del__(self) -> None:
        self._drop()  # closing would let a part of it appear

    def _close_anew(self) -> None:
        self._file.closed = self._file.forced = False  # fsspec takes it for closed after an error
        self._file.close()

    def _asked(self, do: Callable[[], Any]) -> Any:
        taken = self._taken
        try:
            return do()
        except Exception as error:  # each file system has errors of its own
            told = _failure(self._path, error)
            if taken is not None and taken == self._taken:
                raise PartNotSent(*told.args) from error
            raise told from error

    @property
    def _taken(self) -> int | None:
        """How many parts S3 has taken; None before the first, and of other stores."""
        parts = getattr(self._file, "parts", None)
        return len(parts) if parts else None

    def _drop(self) -> None:
        """Gives the object up."""
        self._is_dropped = True
        self._give_up()

    def _give_up(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):
                file.discard()
            with suppress(AttributeError):
                file.closed = True  # fsspec would complete it when it is collected


class _Download(io.RawIOBase):
    """An object that is read from any position by ranges of a part at most, of which the last is kept."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._at = path, 0
        self._kept, self._begin = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a position."""
        if whence == io.SEEK_END:
            offset += self._path.stat().st_size
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, memory: Any) -> int:
        """Reads the next bytes."""
        view = memoryview(memory).cast("B")
        if not self._begin <= self._at < self._begin + len(self._kept):
            size = min(max(len(view), _AHEAD), _PART)
            self._kept = b""  # so that one part is in memory
            self._kept, self._begin = self._path.read_range(self._at, self._at + size), self._at
        start = self._at - self._begin
        data = memoryview(self._kept)[start : start + len(view)]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
