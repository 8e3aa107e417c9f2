"""The interface of saves, and writing and reading by `torch.distributed.checkpoint`.

Checksums are taken while files are written. Pickled values in data files must be plain, or of classes that
users admit, unless the folder is trusted.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import re
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from tqdm import tqdm  # type: ignore[import-untyped]

from fsdp_wrap._core import Seam, __version__, sync_folder
from fsdp_wrap._params import like_made_of_tensors
from fsdp_wrap.checkpoint._manifest import DRAFT, METADATA, Fault, Manifest, durable, naming
from fsdp_wrap.checkpoint._places.remote import persistently
from fsdp_wrap.checkpoint._planning import agree
from fsdp_wrap.checkpoint._team import ALONE, T, Team
from fsdp_wrap.checkpoint._torch_private import (
    DistWrapper,
    StorageWriterTransforms,
    load_state_dict,
)

_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_RECORD = re.compile(rb"/data/0FB(..)", re.DOTALL)
"""The header of a tensor's bytes in a file by `torch.save`; it ends with the length of what fills it up."""


@dataclass(frozen=True)
class _Checked(WriteResult):
    """DCP's result of one written item, with its CRC-32; DCP sends it to the first rank."""

    crc: int = 0


class _NewFiles(FileSystem):
    """DCP's file operations, on paths of any kind.

    A file that is written must not be there, not even as a link to another one.
    """

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Opens a file."""
        with naming(path), path.open(mode.replace("w", "x")) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        """Returns the path of a file in a folder."""
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        """Gives a file another name."""
        path.rename(new_path)

    def exists(self, path: Any) -> bool:
        """Whether a file is there, in a folder that was made for this save."""
        return False


class CheckedWriter(FileSystemWriter):
    """Writes as its base does, and a manifest on the first rank."""

    def __init__(self, path: Path, step: int, world_size: int, progress: bool, patience: float = 0.0) -> None:
        # An object has no descriptor to sync, for which torch would sync all disks.
        super().__init__("", sync_files=isinstance(path, Path))
        self.fs, self.path = _NewFiles(), path
        self._folder, self._step, self._world_size = path, step, world_size
        self._bar = {"disable": not progress, "delay": patience}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes no folder: there is one, or none is wanted any more."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; the results bring their checksums."""
        return persistently(self._folder, lambda: self._write_checked(plan, planner))

    def _write_checked(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        total = sum(map(_payload, plan.items))
        how: dict[str, Any] = {"unit": "B", "unit_scale": True, **self._bar}
        if not sys.stderr.isatty():  # in a file, where each refresh is a line, ten of them
            how |= {"miniters": max(1, total // 10), "mininterval": 0.0, "maxinterval": float("inf")}
        with tqdm(total=total, desc="checkpoint", **how) as bar:
            # What is written beside the tensors does not count.
            self.transforms = sums = _Sums(self._folder, lambda size: bar.update(min(size, total - bar.n)))
            with _failures_of(sums.streams.values()):
                results = super().write_data(plan, planner).value()
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(
            [_Checked(**vars(result), crc=sums.streams[result.index].crc) for result in results]
        )
        return checked

    def save(self, state: dict[str, Any], team: Team) -> None:
        """Writes a state by all ranks: by the plan of the save before if all know it, else by a new one."""
        known = self.known(state, team)
        if not all(team.gather(known is not None)):
            known = self._planned(state, team)
        DistWrapper(team.group, team.group is not None, 0).all_reduce("write", *known)

    def _planned(self, state: dict[str, Any], team: Team) -> Any:
        """Returns what writes and finishes by a new plan, which each rank makes for itself."""
        agreed = agree(state, team)
        return (
            lambda: self.write_data(agreed.own_plan(), agreed.planner).value(),
            lambda results: self.finish(agreed.metadata(), results),
        )

    def known(self, state: dict[str, Any], team: Team) -> Any:
        """Returns what writes and finishes by the plan of the save before, if that is known here and fits."""
        return None

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Writes the metadata, as plain readers know it, and the manifest."""
        results = [pickle.loads(of_rank) if isinstance(of_rank, bytes) else of_rank for of_rank in results]
        persistently(self._folder, lambda: super(CheckedWriter, self).finish(metadata, results))
        files: dict[str, list[list[int]]] = {}
        for result in (cast(_Checked, result) for of_rank in results for result in of_rank):
            place = result.storage_data
            files.setdefault(place.relative_path, []).append([place.offset, place.length, result.crc])
        data = (self._folder / METADATA).read_bytes()
        files[METADATA] = [[0, len(data), zlib.crc32(data)]]
        ordered = {name: sorted(files[name]) for name in sorted(files)}
        versions = {"fsdp_wrap": __version__, "torch": str(torch.__version__)}
        Manifest(self._step, self._world_size, ordered, versions).write(self._folder, DRAFT)

    def storage_meta(self) -> StorageMeta:
        """Says nothing of where this was written: the folder gets another name."""
        return StorageMeta(save_id=self.save_id)


in_process: Seam[Callable[..., Any]] = Seam("writing in a process", "fsdp_wrap._writer_process")
"""Returns for a model's state a copy and what writes it; None if a thread does better."""


@dataclass(frozen=True, kw_only=True)
class Save(ABC):
    """A planned save; `keep_last` counts this step too, None is the default of the place."""

    team: Team
    state: dict[str, Any]
    step: int | None = None
    keep_last: int | None = None
    progress: bool = False
    writer: Callable[..., CheckedWriter] = CheckedWriter

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("keep_last", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise TypeError(f"{name} must be a whole number or None, not {type(value).__name__}")
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @abstractmethod
    def write(self) -> Path:
        """Writes the step, on every rank; it appears once all have succeeded, or not at all."""


class _Sums(StorageWriterTransforms):
    """Passes items on to their file, with checksums of their bytes."""

    def __init__(self, folder: Path, count: Callable[[int], object]) -> None:
        super().__init__()
        self._folder, self._count = folder, count
        self.streams: dict[MetadataIndex, _SummedStream] = {}

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Returns the stream for one item, which tells readers of no transformation."""
        stream = _SummedStream(raw_stream, self._folder, self._count)
        self.streams[write_item.index] = stream
        # torch.save writes many small pieces, each of which would be a call of Python.
        return io.BufferedWriter(stream, 1 << 16), []


class _SummedStream(io.RawIOBase):
    """A stream that passes bytes on to another, which stays open; counts and checksums them."""

    def __init__(self, raw: Any, path: Path, count: Callable[[int], object] = lambda size: None) -> None:
        self._raw, self._path, self._count = raw, path, count
        self.crc = 0
        self.refusal: tuple[int | None, str, str] | None = None  # of the last write, with the path

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Writes bytes."""
        self.crc = zlib.crc32(data, self.crc)
        try:
            written = int(self._raw.write(data))
        except OSError as error:
            self.refusal = error.errno, error.strerror or str(error), str(self._path)
            del data  # Python 3.12 dies of collecting a view of a `BytesIO`, which the traceback would hold
            raise
        self._count(written)
        return written


@contextmanager
def _failures_of(streams: Iterable[_SummedStream]) -> Iterator[None]:
    """Raises a stream's own error in place of torch's, which does not name the cause."""
    try:
        yield
    except Exception as error:
        for stream in streams:
            if stream.refusal is not None:
                raise OSError(*stream.refusal) from error
        raise


def write_file(value: Any, path: Path) -> None:
    """Writes a value by `torch.save`; the file appears when all of it is there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # left by a crash, or laid there by others as a link
        with durable(partial) as file:
            stream = _SummedStream(file, partial)
            with _failures_of([stream]):
                torch.save(value, cast("IO[bytes]", stream))
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def rank_of(file: str) -> int:
    """Returns the rank that writes a file; the first rank writes common files."""
    match = _FILE.fullmatch(file)
    return int(match[1]) if match else 0


def _payload(item: WriteItem) -> int:
    """Returns the bytes of a tensor's chunk; what is pickled does not count."""
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data is not None else 0


# reading


def read(
    reader: KnownReader, flat: dict[str, Any], team: Team, use: Callable[[], T], *, trusted: bool = False
) -> T:
    """Reads entries of a step on all ranks, tensors in place, pickled ones by replacement, and uses them."""
    entries = {key: reader.metadata.state_dict_metadata[key] for key in flat}  # DCP would look for others
    reader.metadata = replace(reader.metadata, state_dict_metadata=entries)
    among = team if reader.is_collective else ALONE  # each rank knows its part without a plan of all

    def read_own() -> T:
        with among.in_dcp(f"reading {reader.folder}"):
            alone = among.group is None
            load_state_dict(flat, reader, among.group, no_dist=alone, planner=_ValuesPlanner(trusted))
        return use()

    return team.together(read_own)


def allocated(entry: Any, like: Any = None) -> torch.Tensor | None:
    """Returns memory to read an entry into, sharded like `like` if shapes match; None for pickled entries."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if isinstance(like, torch.Tensor) and like.shape == entry.size and like.dim() > 0:
        made = like_made_of_tensors(like)
        return torch.empty_like(like, dtype=dtype, requires_grad=False) if made is None else made
    return torch.empty(entry.size, dtype=dtype, device="cpu")


class KnownReader(FileSystemReader):
    """Reads a checkpoint whose metadata were read already, each item at once."""

    is_collective = False

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__("")
        self.fs, self.path = _NewFiles(), folder
        self.folder, self.metadata = folder, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata that was read already."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads items file by file; those that were transformed are left to the base class."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            files.setdefault("" if place.transform_descriptors else place.relative_path, []).append(item)
        transformed = files.pop("", [])
        for name, items in files.items():
            of_pieces = groupby(sorted(items, key=self._offset), self._offset)
            self.read_file(name, [[*of_piece] for _, of_piece in of_pieces], planner)
        return super().read_data(replace(plan, items=transformed), planner)

    def refuse_damage(self) -> None:
        """Raises what was found to be damaged of what was read."""

    def _offset(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].offset)

    def read_file(self, name: str, of_pieces: Sequence[Sequence[ReadItem]], planner: LoadPlanner) -> None:
        """Reads pieces of one file in their order, each once for all items that want some of it."""
        with (self.folder / name).open("rb") as file:
            for items in of_pieces:
                place = self.storage_data[items[0].storage_index]
                file.seek(place.offset)
                self.put(items, file, place.length, planner)

    def put(
        self, items: Sequence[ReadItem], file: io.BufferedIOBase, length: int, planner: LoadPlanner
    ) -> None:
        """Puts the piece at a file's position where its items belong, as DCP does with what it has read."""
        index = items[0].storage_index
        if items[0].type == LoadItemType.BYTE_IO:
            data = file.read(length)
            for item in items:
                planner.load_bytes(item, io.BytesIO(data))
            return
        targets = [planner.resolve_tensor(item).detach() for item in items]
        entry = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[index.fqn])
        sizes, dtype = entry.chunks[index.index or 0].sizes, entry.properties.dtype
        is_plain = type(targets[0]) is torch.Tensor and targets[0].is_cpu and targets[0].is_contiguous()
        fits = is_plain and targets[0].dtype == dtype and targets[0].shape == sizes
        memory = targets[0] if fits else torch.empty(sizes, dtype=dtype, device="cpu")
        piece = _tensor_in(file, length, memory)
        if piece.shape != sizes:
            raise RuntimeError(
                f"'{index.fqn}' has no piece of shape {tuple(sizes)} in its file: do not trust this folder"
            )
        for item, target in zip(items, targets):
            if piece is not target:
                part = piece
                for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths)):
                    part = part.narrow(dim, start, size)
                target.copy_(part)
            planner.commit_tensor(item, target)

    def faults(self, team: Team) -> list[tuple[str, list[Fault]]]:
        """Returns where each rank reads, and what it found damaged; collective. All was verified before."""
        return []

    def __enter__(self) -> KnownReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Says that reading has ended, well or not."""


def _tensor_in(file: io.BufferedIOBase, length: int, memory: torch.Tensor) -> torch.Tensor:
    """Returns a tensor at a file's position: in memory of its dtype and shape if plain, else its own."""
    head = _head_of(memory.dtype, memory.shape)
    begin = file.read(min(len(head), length))
    if begin != head:
        data = io.BytesIO(begin + file.read(length - len(begin)))
        return torch.load(data, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    if file.readinto((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())) < memory.nbytes:
        raise EOFError("a file has become shorter while it was read: load it again, or an earlier step")
    return memory


class _Unseekable(io.BytesIO):
    """Takes what is written, without holes."""

    def seek(self, *_: Any) -> int:
        return self.tell()


@lru_cache(1 << 12)
def _head_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Returns what `torch.save` writes before the bytes of a plain tensor: all that tells how to read them.

    Something that no file begins with where it writes no such bytes.
    """
    written = _Unseekable()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), written)
    match = _RECORD.search(written.getvalue())
    return written.getvalue()[: match.end() + int.from_bytes(match[1], "little")] if match else b"none"


class _ValuesPlanner(DefaultLoadPlanner):
    """Reads pickled entries by `unpacked`."""

    def __init__(self, trusted: bool) -> None:
        super().__init__()
        self._trusted = trusted

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads one pickled entry."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = unpacked(value.getvalue(), f"'{name}'", self._trusted)


def packed(value: Any) -> bytes:
    """Pickles a value; tensors that it refers to are copied now, and only the part that it shows."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, name: str, trusted: bool) -> Any:
    """Returns a packed value; refuses more than plain values, unrun, unless it is trusted."""
    with torch.serialization.safe_globals(of_numpy()):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
        except pickle.UnpicklingError as error:
            raise RuntimeError(f"{name} {_reason(data, error)}") from error


def _reason(data: bytes, error: Exception) -> str:
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    if not unsafe:
        return f"is no plain value: {error}"
    return (
        f"is no plain value: it asks for {', '.join(sorted(unsafe))}, and nothing of that was run. If you "
        "know who wrote this folder, admit the classes by torch.serialization.add_safe_globals([...]), or "
        "all by checkpoint.load(..., trusted=True)"
    )


def of_numpy() -> list[Any]:
    """Returns the functions and classes by which numpy's arrays, scalars and random state are pickled."""
    try:
        import numpy
    except ImportError:
        return []
    core: Any = numpy._core if hasattr(numpy, "_core") else numpy.core  # renamed in numpy 2
    makers = [
        (getattr(core.multiarray, maker), f"numpy.{place}.multiarray.{maker}")
        for maker in ("_reconstruct", "scalar")
        for place in ("_core", "core")
    ]
    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    return [numpy.ndarray, numpy.dtype, *kinds, *makers]
