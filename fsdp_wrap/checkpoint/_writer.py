"""Writing by `torch.distributed.checkpoint`, with the checksums of what was written on the way."""

from __future__ import annotations

import dataclasses
import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from tqdm import tqdm  # type: ignore[import-untyped]

from fsdp_wrap._torch_private import StorageWriterTransforms
from fsdp_wrap.checkpoint._manifest import Manifest
from fsdp_wrap.checkpoint._metadata import METADATA

__all__ = ["CheckedWriter", "KnownReader", "rank_of"]

_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class _Checked(WriteResult):
    """What was written, with its CRC-32, as it travels to the first rank with all else."""

    crc: int = 0


class CheckedWriter(FileSystemWriter):
    """Writes as its base does, and a manifest on the first rank.

    Args:
        path: The step's hidden folder.
        step: Its number.
        world_size: How many ranks write.
        progress: Whether to show a bar of this rank's bytes.
    """

    def __init__(self, path: Path, step: int, world_size: int, progress: bool) -> None:
        super().__init__(path)
        self._folder, self._step, self._world_size = path, step, world_size
        self._progress = progress

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes no folder: there is one, or none is wanted any more."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; the results bring their checksums."""
        total = sum(map(_payload, plan.items))
        with tqdm(
            total=total, desc="checkpoint", unit="B", unit_scale=True, disable=not self._progress
        ) as bar:
            sums = _Sums(bar.update)
            self.transforms = sums
            try:
                results = super().write_data(plan, planner).value()
            except Exception as error:
                sums.raise_failure(self._folder, error)
                raise
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([sums.checked(result) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the metadata, as plain readers know it, and the manifest."""
        super().finish(metadata, [[_plain(result) for result in of_rank] for of_rank in results])
        files: dict[str, list[list[int]]] = {}
        for result in (cast(_Checked, result) for of_rank in results for result in of_rank):
            place = result.storage_data
            files.setdefault(place.relative_path, []).append([place.offset, place.length, result.crc])
        data = (self._folder / METADATA).read_bytes()
        files[METADATA] = [[0, len(data), zlib.crc32(data)]]
        ordered = {name: sorted(files[name]) for name in sorted(files)}
        Manifest(self._step, self._world_size, ordered, _versions()).write(self._folder)

    def storage_meta(self) -> StorageMeta:
        """Says nothing of where this was written: the folder gets another name."""
        return StorageMeta(save_id=self.save_id)


class KnownReader(FileSystemReader):
    """Reads a checkpoint whose metadata were read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what was read."""
        return self._metadata


class _Sums(StorageWriterTransforms):
    """Hands items on to their file and sums up their bytes."""

    def __init__(self, count: Callable[[int], object]) -> None:
        super().__init__()
        self._count = count
        self._streams: dict[MetadataIndex, _SummedStream] = {}

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Returns the stream for one item, which tells readers of no transformation."""
        size = _payload(write_item)
        stream = _SummedStream(raw_stream, lambda: self._count(size))
        self._streams[write_item.index] = stream
        return cast("IO[bytes]", stream), []

    def raise_failure(self, folder: Path, error: Exception) -> None:
        """Raises what kept a stream from taking bytes, if that happened: torch's own error does not tell."""
        for stream in self._streams.values():
            if (failure := stream.failure) is not None:
                raise OSError(failure.errno, failure.strerror or str(failure), str(folder)) from error

    def checked(self, result: WriteResult) -> _Checked:
        """Adds the checksum of what was written."""
        fields = {each.name: getattr(result, each.name) for each in dataclasses.fields(WriteResult)}
        return _Checked(**fields, crc=self._streams[result.index].crc)


class _SummedStream(io.IOBase):
    """Passes bytes on to a stream, which stays open; tells when it is closed itself."""

    def __init__(self, raw: Any, tell: Callable[[], object]) -> None:
        self._raw, self._tell = raw, tell
        self.crc = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes bytes."""
        self.crc = zlib.crc32(data, self.crc)
        try:
            return int(self._raw.write(data))
        except OSError as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Ends the item."""
        if not self.closed:
            self._tell()
        super().close()


def rank_of(file: str) -> int:
    """Returns which rank writes a file: its own, or, as the first, what is for all."""
    found = _FILE.fullmatch(file)
    return int(found[1]) if found else 0


def _payload(item: WriteItem) -> int:
    """Returns the bytes of a tensor's chunk; what is pickled does not count."""
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0


def _plain(result: WriteResult) -> WriteResult:
    return WriteResult(result.index, result.size_in_bytes, result.storage_data)


def _versions() -> dict[str, str]:
    try:
        own = version("fsdp-wrap")
    except PackageNotFoundError:  # run from a checkout
        own = ""
    return {"fsdp_wrap": own, "torch": str(torch.__version__)}
