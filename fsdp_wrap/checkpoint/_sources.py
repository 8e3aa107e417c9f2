"""Checkpoints of all kinds as one: a model's tensors by name, of which each is read when it is asked for.

Step folders, folders that `torch.distributed.checkpoint` (DCP) has written without this library, safetensors,
and files by `torch.save`.
"""

from __future__ import annotations

import copy
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from tqdm import tqdm  # type: ignore[import-untyped]

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._contents import Contents, Keys, Kind, Source, dotted, model_in, models_in
from fsdp_wrap.checkpoint._loading import opened_in_store, refuse, verified
from fsdp_wrap.checkpoint._manifest import MANIFEST, METADATA, ByteRange, read_metadata
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._places.steps import find, place_at
from fsdp_wrap.checkpoint._safetensors import PATIENCE, Named, is_folder_of_tensors, nbytes, read_safetensors
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, of_numpy, read
from fsdp_wrap.checkpoint._team import ALONE

T = TypeVar("T")

_STEP, _FILE = "step folder", "file by torch.save"
_ENDINGS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def open_source(path: Path, step: int | None = None, model: str | None = None) -> Source:
    """Returns a checkpoint's model, or the one that is named; a step folder is verified first."""
    return model_of(open_held(path, step), model)


def model_of(held: Contents, wanted: str | None = None) -> Source:
    """Returns a checkpoint's model, or the one that is named; ours lies under `model`."""
    if wanted is not None or not is_own(held):
        return model_in(held, wanted)
    names = {
        keys: dotted(keys[1:]) for keys in held.entries if keys[0] == "model" and _goes_along(held, keys)
    }
    return Source(held, "model", names)


def sources_in(held: Contents, wanted: str | None = None) -> list[Source]:
    """Returns all models of a checkpoint, or of the part of it that is named; there is one at least."""
    return [model_of(held)] if wanted is None and is_own(held) else models_in(held, wanted)


def carried_of(held: Contents) -> dict[str, Any]:
    """Returns what goes along with the model of a file in our form: the optimizer's state, by its name."""
    optim = held.state.get("optim") if held.kind == _FILE and is_own(held) else None
    return {"optim": optim} if isinstance(optim, Mapping) and "param_groups" in optim else {}


def _goes_along(held: Contents, keys: Keys) -> bool:
    return held.entries[keys] is not None or str(keys[-1]).endswith("_extra_state")


def is_own(held: Contents) -> bool:
    """Whether a checkpoint has the form in which this library writes them."""
    if held.kind == _FILE:
        tops = {keys[0] for keys in held.entries}
        return {"model"} <= tops <= {"model", "optim"} and not _has_parts(held, "model")
    return held.kind == _STEP


def _has_parts(held: Contents, top: str) -> bool:
    """Whether what lies under a key is nested, other than in extra states of modules."""
    below = (keys for keys in held.entries if keys[0] == top)
    return any(len(keys) != 2 and not str(keys[1]).endswith("_extra_state") for keys in below)


def open_held(path: Path, step: int | None = None) -> Contents:
    """Opens a checkpoint of any kind, of which a step folder is verified first."""
    require_there(path)
    if path.is_file() or is_safetensors(path):
        if step is not None:
            raise ValueError(f"--step {step} is for folders of steps, which {path} is not")
        return _of_safetensors(path) if is_safetensors(path) else of_state(path, load_file(path))
    return of_reader(opened(path, step))


def tensors(source: Source, doing: str) -> Iterator[Named]:
    """Yields names and tensors of a model, of which it holds one at a time."""
    entries = source.held.entries
    sizes = {keys: nbytes(*kind) for keys in source.names if (kind := entries[keys])}
    for keys in watched(sizes, f"{doing} {source.held.place.name}", sizes.__getitem__, sum(sizes.values())):
        yield source.names[keys], source.held.read(keys)


def require_there(path: Path) -> None:
    """Raises a ValueError if there is nothing at a path, or something that is read on disks alone."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}")
    if isinstance(path, RemotePath) and (path.is_file() or is_safetensors(path)):
        raise ValueError(
            f"{path} is in a store, of which steps and folders of torch.distributed.checkpoint are read: "
            "copy it to a disk, and name it there"
        )


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder of some by Hugging Face's libraries or by DCP."""
    return is_folder_of_tensors(path) if path.is_dir() else path.suffix == ".safetensors"


def _of_safetensors(path: Path) -> Contents:
    opened = read_safetensors(path)
    entries: dict[Keys, Kind] = {(name,): (value.shape, value.dtype) for name, value in opened.items()}
    return Contents("safetensors", path, entries, lambda keys: opened[str(keys[0])].whole())


# files by torch.save


def load_file(file: Path) -> Any:
    """Returns the content of a file by `torch.save`; tensors are mapped where torch can do that."""
    try:
        with torch.serialization.safe_globals(of_numpy()):
            return torch.load(file, mmap=zipfile.is_zipfile(file), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} {_why(file, error)}") from error


def _why(file: Path, error: Exception) -> str:
    """Returns in one line why a file cannot be loaded."""
    unsafe: list[str] = []
    if zipfile.is_zipfile(file):
        unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if not unsafe:
        line = str(error).strip().partition("\n")[0]
        return f"is no file that torch.load(weights_only=True) reads: {line}"
    return (
        f"holds objects of {listed(unsafe)}, and nothing of them was run. If you know who wrote it, load it "
        "by torch.load(weights_only=False), and save the model's state dict alone"
    )


def of_state(file: Path, state: Any) -> Contents:
    """Returns what is in a state that `load_file` has read."""
    if not isinstance(state, (Mapping, list, tuple)):
        raise ValueError(f"{file} holds no state dict, but an object of {type(state).__name__}")
    leaves = dict(_leaves(state, ()))
    entries: dict[Keys, Kind] = {
        keys: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
        for keys, value in leaves.items()
    }
    return Contents(_FILE, file, entries, leaves.__getitem__, state)


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yields tensors, and what holds none, by their keys."""
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        inner = ((key if isinstance(key, int) else str(key), its) for key, its in value.items())
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    below = [leaf for key, its in inner for leaf in _leaves(its, (*keys, key))]
    if keys and (
        str(keys[-1]).endswith("_extra_state") or not any(isinstance(leaf, torch.Tensor) for _, leaf in below)
    ):
        return (yield keys, value)
    yield from below


# folders of DCP


def of_reader(reader: KnownReader) -> Contents:
    """Returns what is in a folder of DCP, or in the model of a step folder."""
    folder, metadata = reader.folder, reader.metadata
    paths = metadata.planner_data or {key: (key,) for key in metadata.state_dict_metadata}  # else it is flat
    known = {tuple(path): key for key, path in paths.items()}
    described = {keys: metadata.state_dict_metadata[key] for keys, key in known.items()}
    entries = {keys: _kind_of(entry) for keys, entry in described.items()}

    def read_one(keys: Keys) -> Any:
        flat: dict[str, Any] = {known[keys]: allocated(described[keys])}
        read_entries(reader, flat)
        return flat[known[keys]]

    kind = _STEP if (folder / MANIFEST).exists() else "folder of torch.distributed.checkpoint"
    return Contents(kind, folder, entries, read_one)


def read_entries(reader: KnownReader, flat: dict[str, Any]) -> None:
    """Reads some entries, once; raises if what was read in a store is damaged."""
    read(copy.copy(reader), flat, ALONE, reader.refuse_damage)  # which changes what its reader knows of


def _kind_of(entry: Any) -> Kind:
    return (entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def opened(dir: Path, step: int | None) -> KnownReader:
    """Verifies a folder of DCP, and returns what reads it.

    In a step folder every byte is compared with its checksum; in a store when it is read. Other folders have
    none: sizes are compared.
    """
    refuse_parent(dir)
    folder = find(dir, step)
    if is_foreign(folder):
        metadata = read_metadata(folder)
        if lacks := lacks_of_foreign(folder, metadata):
            refuse(folder, lacks)
        return KnownReader(folder, metadata)
    if isinstance(folder, RemotePath):
        return opened_in_store(folder)
    verified(ALONE, folder, verifying)
    return KnownReader(folder, read_metadata(folder))


def verifying(pieces: list[ByteRange]) -> Iterator[ByteRange]:
    """Yields pieces of files to be verified, with a bar."""
    return watched(pieces, "verifying", lambda piece: piece.length, sum(piece.length for piece in pieces))


def is_foreign(folder: Path) -> bool:
    """Whether a folder was written by DCP without this library; such a one has no manifest, nor our name."""
    return (
        (folder / METADATA).exists()
        and not (folder / MANIFEST).exists()
        and place_at(folder.parent).number_in(folder.name) is None
    )


def refuse_parent(dir: Path) -> None:
    """Raises a ValueError if a folder is no checkpoint and holds some, with their names."""
    if not dir.is_dir() or (dir / METADATA).exists() or place_at(dir).steps():
        return
    inside = sorted(dir.iterdir())
    folders = [
        path.name
        for path in inside
        if (path / METADATA).is_file() or (path.is_dir() and is_safetensors(path))
    ]
    files = [path.name for path in inside if path.suffix in _ENDINGS and path.is_file()]
    for kind, inner in (("folders", folders), ("files", files)):
        if inner:
            raise ValueError(f"{dir} holds no step folder: name one of the {kind} in it: {listed(inner)}")


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


def watched(things: Iterable[T], doing: str, size_of: Callable[[T], int], total: int) -> Iterator[T]:
    """Yields things, and shows a bar of the bytes taken at a terminal."""
    # `None` shows none where standard error is no terminal.
    how = {"delay": PATIENCE, "leave": False, "disable": None, "file": sys.stderr}
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, **how) as bar:
        for thing in things:
            yield thing
            bar.update(size_of(thing))
