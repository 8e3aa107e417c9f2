"""Weights through a folder: each update a subfolder of safetensors files, which appears when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_wrap._core import open_own, own_folder, refuse_others, sync_folder
from fsdp_wrap._state import FirstRank
from fsdp_wrap.weights._changes import Change, Changes, apply_changes
from fsdp_wrap.weights._source import WeightMeta, WeightSource

if TYPE_CHECKING:
    from fsdp_wrap.checkpoint._hub import Described

_NAME, _ABOUT, _END = "version-{:08}", "update.json", "closed"
_INDEX, _VALUE = "index:", "value:"
_PAUSE = 0.02
"""Seconds between two looks into the folder."""


class WeightFolder:
    """Writes a model's weights, whole or what changed, into a folder that receivers read at their own pace.

    Every rank makes one and calls `send`; the first rank, which alone has a path, also calls `send_changes`.
    Updates are numbered. Needs the extra `safetensors` where it is read. It alone deletes versions.

    Args:
        path: Path of the folder, on the first rank; None on all others.
        keep_last: How many whole versions stay, with the changes after them. Older ones are removed when a
            whole one has been written. None keeps all.

    Attributes:
        version: The number of what was written last; it goes on where an earlier run has ended.

    Raises:
        ValueError: If `keep_last` is less than 1.
    """

    def __init__(self, path: str | os.PathLike[str] | None, keep_last: int | None = 2) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, or None to keep all versions, not {keep_last}")
        self._path = None if path is None else Path(path)
        self._keep_last, self._gap = keep_last, False
        self.version = 0
        if self._path is not None:
            with suppress(OSError, ValueError):  # the first `send` tells of it, on all ranks
                own_folder(self._path)
                (self._path / _END).unlink(missing_ok=True)
                self.version = max(_versions(self._path), default=0)

    def send(self, source: WeightSource) -> None:
        """Writes all tensors of a source; collective.

        If that fails, nothing of it stays, and the next one gets its number.

        Args:
            source: The source, of the same model on every rank.

        Raises:
            RuntimeError: On every rank, when all have come to the end, if the first one could not write.
            TypeError: If a tensor is of a tensor subclass; before anything is gathered, on every rank.
            ValueError: If safetensors has no such dtype; likewise.
        """
        from fsdp_wrap.checkpoint._safetensors import refuse_unwritable

        source.refuse_subclasses("WeightFolder.send()")
        described = {name: (shape, dtype) for name, dtype, shape in source.metadata()}
        refuse_unwritable(described)
        write = partial(self._write, described, True, {})
        self._gap = True
        self.version = FirstRank(source.model).uses(iter(source), write, "WeightFolder.send()")
        self._gap = False

    def send_changes(self, changes: Changes) -> None:
        """Writes what `WeightChanges.collect` has found.

        Args:
            changes: The changes since the last version.

        Raises:
            RuntimeError: On the first rank, if it cannot be written, or what came before it was not.
            ValueError: Likewise, if safetensors has no such dtype.
        """
        if self._path is None:
            self.version += 1
            return
        if self._gap:
            raise RuntimeError(
                f"what came after version {self.version} was not written to {self._path}, and readers would "
                "miss it: send all weights (send) before more changes"
            )
        tensors = {}
        for name, index, value in changes:
            tensors[_INDEX + name], tensors[_VALUE + name] = index, value
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._gap = True
        try:
            self._write(described, False, changes.checksums, iter(tensors.items()))
        except OSError as error:
            raise RuntimeError(f"version {self.version + 1} was not written: {error}") from error
        self._gap = False

    def close(self) -> None:
        """Tells receivers that nothing more comes."""
        if self._path is not None:
            os.close(open_own(self._path / _END, os.O_WRONLY | os.O_CREAT))

    def _write(
        self,
        described: Described,
        whole: bool,
        checksums: dict[str, int],
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> int:
        from fsdp_wrap.checkpoint._manifest import Manifest, crc_of, durable
        from fsdp_wrap.checkpoint._safetensors import write_safetensors

        if self._path is None:
            raise ValueError("the first rank writes, and has no path: give it there")
        refuse_others(self._path)
        name = _NAME.format(self.version + 1)
        aside = self._path / f".{name}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            if described:
                write_safetensors(aside, described, tensors)
            about = {"whole": whole, "names": [*described], "checksums": checksums}
            with durable(aside / _ABOUT) as file:
                file.write(json.dumps(about).encode())
            sizes = {file: file.stat().st_size for file in sorted(aside.iterdir())}
            ranges = {file.name: [[0, size, crc_of(file, 0, size)]] for file, size in sizes.items()}
            Manifest(self.version + 1, 1, ranges).write(aside)
            sync_folder(aside)
            aside.rename(self._path / name)
            sync_folder(self._path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # what was written in part
        self.version += 1
        if whole:
            self._remove_old(self._path)
        return self.version

    def _remove_old(self, folder: Path) -> None:
        whole = _whole(folder)
        if self._keep_last is None or len(whole) <= self._keep_last:
            return
        for version in _versions(folder):
            if version < whole[-self._keep_last]:
                name = _NAME.format(version)
                with suppress(OSError):  # and tries again after the next one
                    (folder / name).rename(folder / f".{name}")  # no reader sees a part of it
                    shutil.rmtree(folder / f".{name}")


@dataclass(frozen=True)
class Update:
    """One version of a `WeightFolder`, of which tensors are read when they are asked for.

    Attributes:
        version: Its number.
        whole: Whether it has all tensors; else only what changed.
        metadata: Name, dtype and shape of the tensors; of changes, how many elements of each there are.
    """

    version: int
    whole: bool
    metadata: list[WeightMeta]
    _checksums: dict[str, int]
    _stored: Mapping[str, Any]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of an update that is whole."""
        for meta in self.metadata if self.whole else ():
            yield meta.name, self._stored[meta.name].whole()

    def changes(self) -> Changes:
        """Returns the changes of an update that is not whole.

        Raises:
            ValueError: If it is.
        """
        if self.whole:
            raise ValueError(f"version {self.version} is whole, and has no changes: iterate over it")
        stored = self._stored
        changes = [
            Change(name, stored[_INDEX + name].whole(), stored[_VALUE + name].whole())
            for name, *_ in self.metadata
        ]
        return Changes(changes, self._checksums)

    def apply(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Writes the update into tensors, in place.

        Args:
            state_dict: Tensors by the names that the source has.

        Raises:
            ValueError: If a name is missing, or a tensor has another shape or dtype; nothing is written.
            RuntimeError: If changes do not fit to what is there, by their checksums; nothing is written.
        """
        if not self.whole:
            apply_changes(state_dict, self.changes())
            return
        for name, dtype, shape in self.metadata:
            target = state_dict.get(name)
            if target is None or (target.dtype, tuple(target.shape)) != (dtype, shape):
                has = (
                    "there is none" if target is None else f"here it is {target.dtype}, {tuple(target.shape)}"
                )
                raise ValueError(f"'{name}' comes as {dtype}, {shape}, and {has}")
        for name, tensor in self:
            state_dict[name].detach().copy_(tensor)


def stored(path: str | os.PathLike[str], after: int = 0, timeout: float | None = 60.0) -> Iterator[Update]:
    """Yields the updates that a `WeightFolder` has written and writes, until that is closed.

    Where the next one was removed, a reader goes on with the last whole one. The files of what is yielded
    were read once, and are as they were written.

    Args:
        path: Path of the folder.
        after: The version that the reader has; what it needs begins with the last whole one after it.
        timeout: Seconds to wait for the next update; None to wait for ever.

    Raises:
        DamagedCheckpoint: If files of an update are not as they were written. It is a `RuntimeError`.
        ImportError: If the package safetensors is not installed.
        RuntimeError: If nothing more comes within the time limit.
    """
    folder, begin = Path(path), time.monotonic()
    after = max([after, *(version - 1 for version in _whole(folder))])
    while True:
        closed = (folder / _END).exists()  # after which nothing more appears
        version = _next(folder, after)
        update = None if version is None else _read(folder, version)
        if update is not None:
            yield update
            after, begin = update.version, time.monotonic()
        elif closed and version is None:
            return
        elif timeout is not None and time.monotonic() > begin + timeout:
            raise RuntimeError(f"no version {after + 1} has appeared in {folder} within {timeout:g} s")
        else:
            time.sleep(_PAUSE)


def _versions(folder: Path) -> list[int]:
    prefix = _NAME.split("{")[0]
    numbers = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return [int(number) for number in numbers if number.isdecimal()]


def _whole(folder: Path) -> list[int]:
    """Returns the whole versions in order, except damaged ones."""
    versions = []
    for version in sorted(_versions(folder)):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((folder / _NAME.format(version) / _ABOUT).read_bytes())["whole"]:
                versions.append(version)
    return versions


def _next(folder: Path, after: int) -> int | None:
    """Returns the following version, or the last whole one where that was removed; None if none is there."""
    if (folder / _NAME.format(after + 1)).is_dir():
        return after + 1
    return max((version for version in _whole(folder) if version > after), default=None)


def _read(folder: Path, version: int) -> Update | None:
    """Returns a verified update; None if it was removed meanwhile."""
    from fsdp_wrap.checkpoint._manifest import DamagedCheckpoint, Manifest, format_faults
    from fsdp_wrap.checkpoint._safetensors import read_safetensors

    place = folder / _NAME.format(version)
    try:
        faults = format_faults(place, Manifest.read(place).faults(place))
        if faults:
            raise DamagedCheckpoint("; ".join(faults))
        about = json.loads((place / _ABOUT).read_bytes())
        given = read_safetensors(place) if about["names"] else {}
    except DamagedCheckpoint as error:
        if place.is_dir():
            raise DamagedCheckpoint(
                f"{place} is damaged: {error}. Go on after the next whole version"
            ) from None
        return None
    except FileNotFoundError:
        if place.is_dir():
            raise
        return None
    prefix = "" if about["whole"] else _VALUE
    metadata = [
        WeightMeta(name.removeprefix(prefix), given[name].dtype, tuple(given[name].shape))
        for name in about["names"]
        if name.startswith(prefix)
    ]
    return Update(version, about["whole"], metadata, about["checksums"], given)
