"""`manifest.json`: what a step folder must hold to be complete, with a CRC-32 of every byte.

The manifest is all that is ours in a step folder. The rest is as `torch.distributed.checkpoint` (DCP) writes
it. Reading `.metadata` runs no code that it may bring: only what DCP writes there is unpickled.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap._core import listed
from fsdp_wrap._core.torch_private import get_layout
from fsdp_wrap.checkpoint._torch_private import StorageInfo

MANIFEST, METADATA = "manifest.json", ".metadata"
DRAFT = ".manifest.json.draft"
"""What the manifest of a step is called until the step is published."""
_CHUNK = 2**22


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that is not as it was written: files are missing, shorter, or have other bytes."""


class ByteRange(NamedTuple):
    """A range of one file's bytes and their CRC-32."""

    file: str
    offset: int
    length: int
    crc: int

    @property
    def span(self) -> range:
        """The places of its bytes."""
        return range(self.offset, self.offset + self.length)

    def torn(self) -> Fault:
        """Returns the fault of other bytes there than were written."""
        return Fault(self.file, f"bytes {self.span.start} to {self.span.stop} are not as written", self.span)


Shown = Callable[[list[ByteRange]], Iterator[ByteRange]]


@dataclass(frozen=True)
class Fault:
    """A fault of a file, or of some of its bytes (`span`; None for the whole file)."""

    file: str
    lack: str
    span: range | None = None


@dataclass(frozen=True)
class Manifest:
    """The files of a step folder, each with its ranges [offset, length, CRC-32], which leave no gaps."""

    step: int
    world_size: int
    files: dict[str, list[list[int]]]
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> Manifest:
        """Reads the manifest of a step folder, or raises `DamagedCheckpoint`."""
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{MANIFEST} is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{MANIFEST} cannot be read: {error}") from None
        try:
            content = json.loads(data)
            if content.pop("crc") == zlib.crc32(_encoded(content)):
                return cls(**content)._of_one_folder()
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise DamagedCheckpoint(f"{MANIFEST} is not as it was written")

    def _of_one_folder(self) -> Manifest:
        for name in self.files:
            if Path(name).name != name:
                raise DamagedCheckpoint(
                    f"{MANIFEST} names a file outside of the folder: {name!r}; do not trust this folder"
                )
        return self

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        """Writes the manifest into a step folder, durably."""
        with durable(folder / name) as file:
            file.write(_encoded({**asdict(self), "crc": self.crc}))

    @property
    def crc(self) -> int:
        """The CRC-32 of what the manifest says."""
        return zlib.crc32(_encoded(asdict(self)))

    def size_of(self, name: str) -> int:
        """Returns the bytes of one file."""
        return sum(length for _, length, _ in self.files[name])

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(map(self.size_of, self.files))

    def missing(self, folder: Path) -> list[Fault]:
        """Returns which files are not there or of another size, without reading them."""
        there: dict[str, Path] = {}
        with suppress(OSError):
            there = {path.name: path for path in folder.iterdir()}  # which a store tells with all sizes
        return [
            Fault(name, lack) for name in self.files if (lack := self._lack(there.get(name, folder / name)))
        ]

    def _lack(self, file: Path) -> str | None:
        try:
            size, expected = file.stat().st_size, self.size_of(file.name)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error}"
        return None if size == expected else f"has {size} of {expected} bytes"

    def pieces(self) -> Iterator[ByteRange]:
        """Yields all ranges of bytes."""
        return (piece for name in self.files for piece in self.pieces_of(name))

    def pieces_of(self, name: str) -> Iterator[ByteRange]:
        """Yields the ranges of one file."""
        return (ByteRange(name, *span) for span in self.files[name])

    def share(self, rank: int, size: int) -> Iterator[ByteRange]:
        """Yields one rank's share of all ranges, cut between them."""
        return share_of([*self.pieces()], rank, size)

    def faults(self, folder: Path, rank: int = 0, size: int = 1, shown: Shown = iter) -> list[Fault]:
        """Checks that all files are there, and this rank's share of the bytes; `shown` may show a bar."""
        missing = self.missing(folder)
        gone = {fault.file for fault in missing}
        pieces = [piece for piece in self.share(rank, size) if piece.file not in gone]
        return [*missing, *verify(folder, shown(pieces))]


def share_of(pieces: Sequence[ByteRange], rank: int, size: int) -> Iterator[ByteRange]:
    """Yields one rank's share of some ranges, cut between them."""
    total, done = max(sum(piece.length for piece in pieces), 1), 0
    for piece in pieces:
        if done * size // total == rank:
            yield piece
        done += piece.length


def verify(folder: Path, pieces: Iterable[ByteRange]) -> Iterator[Fault]:
    """Reads pieces of files and yields those that are not as they were written."""
    for name, of_file in groupby(pieces, attrgetter("file")):
        with ExitStack() as held:
            file: Any = None
            for piece in of_file:
                try:
                    file = file or held.enter_context((folder / name).open("rb", buffering=0))
                    yield from torn(file, [piece])
                except OSError as error:
                    yield Fault(name, f"cannot be read: {error}", piece.span)


def torn(file: IO[bytes], pieces: Iterable[ByteRange]) -> Iterator[Fault]:
    """Reads pieces of one open file and yields those that are not as they were written."""
    return (piece.torn() for piece in pieces if _crc_in(file, piece.offset, piece.length) != piece.crc)


def format_faults(folder: Path, faults: Sequence[Fault]) -> list[str]:
    """Returns a line on each fault, with the names of its entries if the metadata are intact."""
    lost = any(fault.file == METADATA for fault in faults)
    places = [] if lost else _places(folder)
    lines = []
    for fault in faults:
        names = (
            name
            for file, start, name in places
            if file == fault.file and (fault.span is None or start in fault.span)
        )
        concerned = listed(dict.fromkeys(names))
        lines.append(f"{fault.file} {fault.lack}" + (f" ({concerned})" if concerned else ""))
    return lines


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Lets errors of a file's writes name it, also those of what was buffered."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else its text would be lost
            error.filename = str(path)
        raise


@contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing, and syncs it to disk at the end."""
    with naming(path), path.open("xb") as file:
        yield file
        file.flush()
        with suppress(io.UnsupportedOperation):  # an object is durable when it is there
            os.fsync(file.fileno())


def _places(folder: Path) -> list[tuple[str, int, str]]:
    try:
        storage = read_metadata(folder).storage_data
    except Exception:  # whatever unpickling meets
        return []
    return sorted((info.relative_path, info.offset, index.fqn) for index, info in storage.items())


def crc_of(path: Path, offset: int, length: int) -> int:
    """Returns the CRC-32 of some bytes of a file; -1 if it is shorter."""
    with path.open("rb", buffering=0) as file:
        return _crc_in(file, offset, length)


def _crc_in(file: IO[bytes], offset: int, length: int) -> int:
    crc = 0
    file.seek(offset)
    while length > 0 and (data := file.read(min(length, _CHUNK))):
        crc, length = zlib.crc32(data, crc), length - len(data)
    return crc if length == 0 else -1


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


# the metadata of torch


def read_metadata(folder: Path) -> Metadata:
    """Reads DCP's metadata of a folder; refuses, unrun, anything that DCP does not write there."""
    return metadata_in((folder / METADATA).read_bytes(), folder)


def metadata_in(data: bytes, folder: Path) -> Metadata:
    """Unpickles metadata that were read already, with the checks of `read_metadata`."""
    try:
        loaded = _Unpickler(io.BytesIO(data), folder / METADATA).load()
        if not isinstance(loaded, Metadata):
            raise TypeError(type(loaded).__name__)
        tiled: set[tuple[int, tuple[int, ...]]] = set()  # tensors that are cut alike may share a list
        for name, entry in loaded.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            looked_at = id(entry.chunks), tuple(entry.size)
            if looked_at not in tiled and not tile(_boxes(entry), entry.size):
                raise RuntimeError(
                    f"{folder / METADATA} cuts {name!r}, of shape {tuple(entry.size)}, into chunks that "
                    "leave elements out or hold some twice, and nothing was read: do not trust this folder"
                )
            tiled.add(looked_at)
    except (RuntimeError, OSError):
        raise
    except Exception as error:  # whatever unpickling meets
        raise RuntimeError(
            f"{folder / METADATA} holds no metadata of a checkpoint that torch {torch.__version__} reads: "
            f"{type(error).__name__}: {error}"
        ) from error
    for place in (loaded.storage_data or {}).values():
        name = place.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise RuntimeError(
                f"{folder / METADATA} names a file outside of the folder: {name!r}; do not trust this folder"
            )
    return loaded


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


def _boxes(entry: TensorStorageMetadata) -> list[Box]:
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def tile(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether each element of a tensor is in one of some boxes, and in no other."""
    boxes = [*boxes]
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return False
        if any(at < 0 or size < 0 or at + size > of for at, size, of in zip(offsets, sizes, shape)):
            return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    # Few boxes begin within another along the dimension that is cut most.
    dim = max(range(len(shape)), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}), default=0)
    boxes.sort(key=lambda box: box[0][dim : dim + 1])
    return not any(
        _overlap(box, other)
        for number, box in enumerate(boxes)
        for other in takewhile(partial(_begins_within, dim, box), boxes[number + 1 :])
    )


def _begins_within(dim: int, box: Box, other: Box) -> bool:
    """Whether another box begins along a dimension before the end of one."""
    return not box[0] or other[0][dim] < box[0][dim] + box[1][dim]


def _overlap(one: Box, other: Box) -> bool:
    ends = zip(*one, *other)
    return all(max(at, begin) < min(at + size, begin + length) for at, size, begin, length in ends)


class _StandIn(type):
    """A class or function of others while a pickle is read: it can be called, and not be changed."""

    real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real(*args, **kwargs)

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of {cls.__name__}: do not trust this folder")


@cache
def _stand_in(real: Any) -> _StandIn:
    """Makes a stand-in, whose `__new__` (an opcode of pickle) makes instances of the real class."""

    def new(_: type, *args: Any, **kwargs: Any) -> Any:
        return made.real.__new__(made.real, *args, **kwargs)

    is_code = isinstance(real, type) and issubclass(real, Enum)
    made = _StandIn(real.__name__, (), {"__new__": new, "__slots__": (), "real": _Code if is_code else real})
    return made


class _Code:
    """Stands for an enum's member in a pickle: all code shares the real one, which no pickle may change."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Enum) and bool(other.value == self.value)

    __hash__ = None  # type: ignore[assignment]


class _WrittenAt(pathlib.PurePosixPath):
    """The path where a step was written: our own class, since a pickle may set attributes of classes."""


_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    (StorageInfo.__module__, StorageInfo.__name__): StorageInfo,
    # Of another system too, and from newer versions of Python.
    **{(module, name): _WrittenAt for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


def entries_of(loaded: Metadata, *part: str) -> dict[str, tuple[Any, ...]]:
    """Returns the paths of a part of the state, such as the model, by entry name."""
    return {key: path for key, path in (loaded.planner_data or {}).items() if path[: len(part)] == part}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a class or function that DCP's metadata use; raises for any other."""
        if (module, name) in _ADMITTED:
            return _stand_in(_ADMITTED[module, name])
        if module == "torch" and isinstance(member := getattr(torch, name, None), torch.dtype):
            return member
        member = getattr(metadata, name, None)
        if module == metadata.__name__ and isinstance(member, type) and member.__module__ == module:
            return _stand_in(member)  # one of its own classes, which only hold values
        raise RuntimeError(
            f"{self._path} asks for {module}.{name}, which torch.distributed.checkpoint does not write "
            "there, and nothing of it was run: do not trust this folder"
        )
