"""Weights through a folder: each update a subfolder of safetensors files, which appears when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_wrap.weights._changes import Changes
from fsdp_wrap.weights._source import WeightMeta, WeightSource
from fsdp_wrap.weights._updates import Update

_NAME, _ABOUT, _END = "version-{:08}", "update.json", "closed"
_INDEX, _VALUE = "index:", "value:"
_PAUSE = 0.02
"""Seconds between two looks into the folder."""


class WeightFolder:
    """Writes a model's weights, whole or what changed, into a folder that receivers read at their own pace.

    It is used as a `WeightSender`. Needs the extra `safetensors` where it is read.

    Args:
        path: Of the folder, on the first rank; None on all others.

    Attributes:
        version: The number of what was written last; it goes on where an earlier run has ended.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self.version = 0
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
            (self._path / _END).unlink(missing_ok=True)
            self.version = max(_versions(self._path), default=0)

    def send(self, source: WeightSource) -> None:
        """Writes all tensors of a source; collective.

        Raises:
            OSError: On the first rank, when all ranks have come to the end, if it could not write.
        """
        self.version += 1
        tensors, error = iter(source), None
        if self._path is not None:
            try:
                self._write(source.metadata(), tensors, whole=True)
            except OSError as failure:
                error = failure
        for _ in tensors:  # a rank that does not write, or cannot, takes part in the gathers all the same
            pass
        if error is not None:
            raise error

    def send_changes(self, changes: Changes) -> None:
        """Writes what `WeightChanges.collect` has found.

        Raises:
            OSError: If it cannot be written.
        """
        self.version += 1
        if self._path is None:
            return
        described, tensors = [], []
        for name, index, value in changes:
            for prefix, tensor in ((_INDEX, index), (_VALUE, value)):
                described.append(WeightMeta(prefix + name, tensor.dtype, tuple(tensor.shape)))
                tensors.append((prefix + name, tensor))
        self._write(described, iter(tensors), whole=False, checksums=changes.checksums)

    def close(self) -> None:
        """Tells receivers that nothing more comes."""
        if self._path is not None:
            (self._path / _END).touch()

    def _write(
        self,
        described: Sequence[WeightMeta],
        tensors: Iterator[tuple[str, torch.Tensor]],
        whole: bool,
        checksums: dict[str, int] | None = None,
    ) -> None:
        from fsdp_wrap.checkpoint._safetensors import write_safetensors

        assert self._path is not None
        name = _NAME.format(self.version)
        aside = self._path / f".{name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        if described:
            write_safetensors(aside, {each.name: (each.shape, each.dtype) for each in described}, tensors)
        about = {"whole": whole, "names": [each.name for each in described], "checksums": checksums or {}}
        (aside / _ABOUT).write_text(json.dumps(about))
        aside.rename(self._path / name)


def stored(path: str | os.PathLike[str], after: int = 0, timeout: float | None = 60.0) -> Iterator[Update]:
    """Yields the updates that a `WeightFolder` has written and writes, until that is closed.

    Args:
        path: Of the folder.
        after: The version that the reader has; what it needs begins with the last whole one after it.
        timeout: Seconds to wait for the next update; None to wait for ever.

    Raises:
        ImportError: If the package safetensors is not installed.
        RuntimeError: If nothing more comes within the time limit, or files are damaged.
    """
    folder = Path(path)
    last_whole = max(
        (version for version in _versions(folder) if _about(folder, version)["whole"]), default=0
    )
    version = max(after + 1, last_whole)
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        closed = (folder / _END).exists()  # after which nothing more appears
        if (folder / _NAME.format(version)).is_dir():
            yield _read(folder, version)
            version += 1
            end = None if timeout is None else time.monotonic() + timeout
        elif closed:
            return
        elif end is not None and time.monotonic() > end:
            raise RuntimeError(f"no version {version} has appeared in {folder} within {timeout:g} s")
        else:
            time.sleep(_PAUSE)


def _versions(folder: Path) -> list[int]:
    prefix = _NAME.split("{")[0]
    found = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return [int(number) for number in found if number.isdecimal()]


def _about(folder: Path, version: int) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((folder / _NAME.format(version) / _ABOUT).read_text())
    return about


def _read(folder: Path, version: int) -> Update:
    from fsdp_wrap.checkpoint._safetensors import read_safetensors

    about = _about(folder, version)
    given = read_safetensors(folder / _NAME.format(version)) if about["names"] else {}
    contents = _Stored(given, "" if about["whole"] else _VALUE)
    names = [name for name in about["names"] if not name.startswith(_INDEX) or about["whole"]]
    metadata = [WeightMeta(contents.own(name), given[name].dtype, tuple(given[name].shape)) for name in names]
    return Update(version, about["whole"], metadata, about["checksums"], contents)


class _Stored:
    """The tensors of an update in files.

    Args:
        given: What reads them, by their names there.
        prefix: Of the names of tensors.
    """

    def __init__(self, given: Mapping[str, Any], prefix: str) -> None:
        self._given, self._prefix = given, prefix

    def own(self, name: str) -> str:
        """Returns the name in the model of a tensor that has another in the files."""
        return name.removeprefix(self._prefix)

    def tensor(self, meta: WeightMeta) -> torch.Tensor:
        whole: torch.Tensor = self._given[self._prefix + meta.name].whole()
        return whole

    def index(self, meta: WeightMeta) -> torch.Tensor:
        index: torch.Tensor = self._given[_INDEX + meta.name].whole()
        return index
