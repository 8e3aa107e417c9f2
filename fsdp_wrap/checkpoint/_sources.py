"""Checkpoints of all kinds as one: a model's tensors by name, of which each is read when it is asked for.

Step folders, folders that `torch.distributed.checkpoint` (DCP) has written without this library, safetensors,
and files by `torch.save`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm  # type: ignore[import-untyped]

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._folders import find, is_step, steps_in
from fsdp_wrap.checkpoint._loading import refuse, verified
from fsdp_wrap.checkpoint._manifest import (
    MANIFEST,
    METADATA,
    ByteRange,
    entries_of,
    read_metadata,
)
from fsdp_wrap.checkpoint._safetensors import INDEX, SINGLE, Described, Named, nbytes, read_safetensors
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, read
from fsdp_wrap.checkpoint._team import ALONE

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds until a bar appears on standard error; what is done before shows none."""


@dataclass(frozen=True)
class Source:
    """A model's tensors as a checkpoint holds them."""

    kind: str
    place: Path
    described: Described
    read: Callable[[str], torch.Tensor]
    left_out: list[str] = field(default_factory=list)

    def tensors(self, doing: str) -> Iterator[Named]:
        """Yields names and tensors, of which it holds one at a time."""
        total = sum(map(self.size_of, self.described))
        for name in watched(self.described, f"{doing} {self.place.name}", self.size_of, total):
            yield name, self.read(name)

    def size_of(self, name: str) -> int:
        """Returns the bytes of a tensor."""
        return nbytes(*self.described[name])


def open_source(path: Path, step: int | None = None) -> Source:
    """Opens a checkpoint of any kind, of which a step folder is verified first."""
    require_there(path)
    if path.is_file() or is_safetensors(path):
        if step is not None:
            raise ValueError(f"--step {step} is for folders of steps, which {path} is not")
        return _of_safetensors(path) if is_safetensors(path) else of_state(path, load_file(path))
    folder, metadata = opened(path, step)
    kind = "step folder" if (folder / MANIFEST).exists() else "folder of torch.distributed.checkpoint"
    keys = {name: key for key, name in model_of(metadata).items()}
    described, left_out = described_in(metadata)

    def read_one(name: str) -> torch.Tensor:
        flat: dict[str, Any] = {keys[name]: allocated(metadata.state_dict_metadata[keys[name]])}
        found: torch.Tensor = read(KnownReader(folder, metadata), flat, ALONE, lambda: flat[keys[name]])
        return found

    return Source(kind, folder, described, read_one, left_out)


def described_in(metadata: Metadata) -> tuple[Described, list[str]]:
    """Returns shape and dtype of a model's tensors by name, and the names of entries that are no tensors."""
    entries = {name: metadata.state_dict_metadata[key] for key, name in model_of(metadata).items()}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    described = {name: (entry.size, entry.properties.dtype) for name, entry in tensors.items()}
    return described, [name for name in entries if name not in tensors]


def require_there(path: Path) -> None:
    """Raises a ValueError if there is nothing at a path."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder of some with the names that Hugging Face gives."""
    if path.is_dir():
        return (path / SINGLE).exists() or (path / INDEX).exists()
    return path.suffix == ".safetensors"


def _of_safetensors(path: Path) -> Source:
    found = read_safetensors(path)
    described = {name: (value.shape, value.dtype) for name, value in found.items()}
    return Source("safetensors", path, described, lambda name: found[name].whole())


# files by torch.save


def load_file(file: Path) -> dict[str, Any]:
    """Returns the content of a file by `torch.save`, mapped: `model`, and `optim` if it is there."""
    try:
        state = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is no file that torch.load(weights_only=True) reads: {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file} holds no state dict")
    if set(state) <= {"model", "optim"} and isinstance(state.get("model"), Mapping):
        return dict(state)
    if not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{file} holds neither 'model' (and 'optim') nor a model's state dict")
    return {"model": dict(state)}


def of_state(file: Path, state: Mapping[str, Any]) -> Source:
    """Returns the source of a state that `load_file` has read."""
    tensors = {name: value for name, value in state["model"].items() if isinstance(value, torch.Tensor)}
    described = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    left_out = [name for name in state["model"] if name not in tensors]
    return Source("file by torch.save", file, described, tensors.__getitem__, left_out)


# folders of DCP


def opened(dir: Path, step: int | None) -> tuple[Path, Metadata]:
    """Verifies a folder of DCP, and returns it with DCP's metadata.

    In a step folder every byte is compared with its checksum. Other folders have none: sizes are compared.
    """
    refuse_parent(dir)
    folder = find(dir, step)
    if is_foreign(folder):
        metadata = read_metadata(folder)
        if lacks := lacks_of_foreign(folder, metadata):
            refuse(folder, lacks)
        return folder, metadata
    verified(ALONE, folder, verifying)
    return folder, read_metadata(folder)


def verifying(pieces: list[ByteRange]) -> Iterator[ByteRange]:
    """Yields pieces of files to be verified, with a bar."""
    return watched(pieces, "verifying", lambda piece: piece.length, sum(piece.length for piece in pieces))


def is_foreign(folder: Path) -> bool:
    """Whether a folder was written by DCP without this library; such a one has no manifest, nor our name."""
    return (folder / METADATA).exists() and not (folder / MANIFEST).exists() and not is_step(folder)


def refuse_parent(dir: Path) -> None:
    """Raises a ValueError if a folder holds some of DCP's and no step of ours, with the names of those."""
    if dir.is_dir() and not (dir / METADATA).exists() and not steps_in(dir):
        if inner := sorted(path.name for path in dir.iterdir() if (path / METADATA).is_file()):
            raise ValueError(f"{dir} holds no step folder: name one of the folders in it: {listed(inner)}")


def lacks_of_foreign(folder: Path, metadata: Metadata) -> list[str]:
    """Returns a line on each file that is missing or shorter than DCP has noted."""
    lacks = []
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            lacks.append(f"{name} is missing" if size is None else f"{name} has {size} of {end} bytes")
    return lacks


def model_of(found: Metadata) -> dict[str, str]:
    """Returns the names of a model's parameters and buffers by the names of their entries.

    The model is what lies under `model`, at the top or one level below; else all tensors that no optimizer
    owns.
    """
    if own := entries_of(found, "model"):
        return {key: key.removeprefix("model.") for key in own}
    paths = found.planner_data or {key: (key,) for key in found.state_dict_metadata}  # else it is flat
    if below := {key: path for key, path in paths.items() if path[1:2] == ("model",)}:
        return {key: key.removeprefix(f"{path[0]}.model.") for key, path in below.items()}
    others = {"optim", "optimizer", "optimizer_state", "extra", "random"}
    entries = found.state_dict_metadata
    tensors = [key for key in entries if isinstance(entries[key], TensorStorageMetadata)]
    names = {key: key for key in tensors if paths[key][0] not in others}
    if not names:
        top = listed(dict.fromkeys(path[0] for path in paths.values()))
        raise ValueError(f"no tensors of a model are there, only {top or 'nothing'}")
    return names


def watched(things: Iterable[T], doing: str, size_of: Callable[[T], int], total: int) -> Iterator[T]:
    """Yields things, and shows a bar of the bytes taken at a terminal."""
    # `None` shows none where standard error is no terminal.
    how = {"delay": PATIENCE, "leave": False, "disable": None, "file": sys.stderr}
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, **how) as bar:
        for thing in things:
            yield thing
            bar.update(size_of(thing))
