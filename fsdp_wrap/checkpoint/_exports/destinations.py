"""Where an export goes: files appear together on disk, and by one request in a store."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_wrap._core import own_folder, refuse_unusable
from fsdp_wrap.checkpoint._hub import Described
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._places.steps import path_at
from fsdp_wrap.checkpoint._safetensors import ASIDE, INDEX, SINGLE, index_of, install

_ABANDONED = 3600.0
"""Seconds after which files that nobody writes to are those of an export that was killed."""
_TAGGED = re.compile(r"model-\d{5}-of-\d{5}\.[0-9a-f]{8}\.safetensors")


class Destination(ABC):
    """A place for an export. The first rank makes one, and all ranks write by it.

    Attributes:
        folder: Where files are written.
        tag: What names of files have before their ending, beside those of the Hub.
    """

    folder: Path
    tag = ""

    @property
    @abstractmethod
    def is_seen(self) -> bool:
        """Whether this rank can write there."""

    @abstractmethod
    def finish(self, plan: Mapping[str, Described], beside: Iterable[tuple[str, bytes]]) -> None:
        """Lets the files appear, with names and contents of others."""

    @abstractmethod
    def leave(self) -> None:
        """Removes files that have not appeared."""


class OnDisk(Destination):
    """A folder on disk; files are written in one below it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        own_folder(path)
        for left in path.glob(f"{ASIDE}*"):
            if all(file.stat().st_mtime < time.time() - _ABANDONED for file in (left, *left.iterdir())):
                shutil.rmtree(left, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=ASIDE, dir=path.absolute()))

    @property
    def is_seen(self) -> bool:
        """Whether this rank sees the folder, which is on a disk of the first rank's host."""
        return self.folder.is_dir()

    def finish(self, plan: Mapping[str, Described], beside: Iterable[tuple[str, bytes]]) -> None:
        """Lets the files take the place of an earlier export."""
        for name, content in beside:
            (self.folder / name).write_bytes(content)
        install(self.folder, self._path, plan)
        shutil.rmtree(self.folder)

    def leave(self) -> None:
        """Removes the folder of what has not appeared."""
        shutil.rmtree(self.folder, ignore_errors=True)


class InStore(Destination):
    """A place in a store, where nothing can be renamed: the index names files that no export had before."""

    def __init__(self, path: RemotePath) -> None:
        self.folder = path
        self.tag = f".{secrets.token_hex(4)}"

    @property
    def is_seen(self) -> bool:
        """Whether this rank can write there: all ranks reach a store."""
        return True

    def finish(self, plan: Mapping[str, Described], beside: Iterable[tuple[str, bytes]]) -> None:
        """Writes the index last; removes the files of an earlier export after that."""
        for name, content in beside:
            (self.folder / name).write_bytes(content)
        if [*plan] == [SINGLE]:
            (self.folder / INDEX).unlink()
        else:
            (self.folder / INDEX).write_bytes(index_of(plan))
            (self.folder / SINGLE).unlink()
        for path in [*self.folder.iterdir()]:
            if _TAGGED.fullmatch(path.name) and path.name not in plan:
                path.unlink()

    def leave(self) -> None:
        """Removes files of this export that no index names."""
        with suppress(OSError, ValueError):
            index = self.folder / INDEX
            named = {*json.loads(index.read_bytes())["weight_map"].values()} if index.is_file() else set()
            for path in [*self.folder.iterdir()]:
                if f"{self.tag}." in path.name and path.name not in named:
                    path.unlink()


def why_not(path: Path, copies: Sequence[Path]) -> str | None:
    """Returns why files cannot be written to a place or copied there; None if they can."""
    lacking = [str(file) for file in copies if not file.is_file()]
    if lacking:
        return f"{', '.join(lacking)} in `files` is no file: give paths of files"
    try:
        if isinstance(path, RemotePath):
            path.is_dir()  # which needs the store's package
        else:
            refuse_unusable(path)
    except (ValueError, OSError, ImportError) as error:
        return str(error)
    return None


def destination_at(path: Path) -> Destination:
    """Returns the destination of a path or URL."""
    place = path_at(path)
    return InStore(place) if isinstance(place, RemotePath) else OnDisk(place)
