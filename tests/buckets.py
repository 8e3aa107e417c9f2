"""An object store that all ranks of a host see, kept as files, which fails when a test says so."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from fsdp_wrap.checkpoint._places import remote, store
from fsdp_wrap.checkpoint._places.remote import RemotePath

REQUESTS = ("cat_file", "pipe_file", "info", "ls", "find", "rm_file", "rm", "open")


class Bucket(LocalFileSystem):
    """Files by the methods of an object store: what lies in `bucket:///folder` is in that folder."""

    protocol = "bucket"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("bucket://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Writes a file, which is there as a whole or not."""
        file = Path(self._strip_protocol(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        aside.write_bytes(value)
        aside.replace(file)


fsspec.register_implementation("bucket", Bucket, clobber=True)


def bucket_in(folder: Path) -> str:
    return f"bucket://{folder}"


def objects_in(place: str) -> list[str]:
    """Returns the names of all objects below a URL, with their folders' names as far as the number."""
    files, begin = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    names = (name.removeprefix(begin).lstrip("/") for name in files.find(begin))
    return sorted(re.sub(r"(step_\d+)\.\w+/", r"\1/", name) for name in names)


@contextmanager
def impatient() -> Iterator[None]:
    """Lets saves and loads wait for less time for what others, or a store, may do."""
    with (
        mock.patch.multiple(store, _BEAT=0.05, _PATIENCE=0.5),
        mock.patch.object(remote, "_WAITS", (0.01,) * 4),
    ):
        yield


@contextmanager
def requests(ask: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Calls a function with number and name of each request of this process, before it; yields all names."""
    asked: list[str] = []
    tried = RemotePath.tried

    def told(path: RemotePath, do: Any) -> Any:
        def counted(files: Any, key: str) -> Any:
            asked.append(" ".join([*do.__code__.co_names[:1], path.name]))
            ask(len(asked), asked[-1])
            return do(files, key)

        return tried(path, counted)

    with mock.patch.object(RemotePath, "tried", told):
        yield asked


def kill_at(number: int | str) -> Callable[[int, str], None]:
    """Returns what kills this process before a request, of a number or a name."""

    def ask(count: int, name: str) -> None:
        if number in (count, name):
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
