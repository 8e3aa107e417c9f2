"""Conversions of checkpoints in one process, without a model; each is read back and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._folders import find
from fsdp_wrap.checkpoint._loading import verified
from fsdp_wrap.checkpoint._manifest import entries_of
from fsdp_wrap.checkpoint._safetensors import Named, read_safetensors, write_safetensors
from fsdp_wrap.checkpoint._saving import SharedSave
from fsdp_wrap.checkpoint._sources import (
    PATIENCE,
    Source,
    is_foreign,
    is_safetensors,
    load_file,
    model_of,
    of_state,
    open_source,
    opened,
    refuse_parent,
    verifying,
    watched,
)
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, read, write_file
from fsdp_wrap.checkpoint._team import ALONE
from fsdp_wrap.checkpoint._torch_private import unflatten_state_dict


def to_torch_file(dir: Path, out: Path, step: int | None = None) -> Path:
    """Writes full model and optimizer state as one file that `torch.load(weights_only=True)` reads.

    Extras and random states, which may be anything, are left out. All of it is in memory meanwhile.
    """
    _require_new(out)
    folder, metadata = opened(dir, step)
    if entries_of(metadata, "model"):
        paths = {key: path for key, path in metadata.planner_data.items() if path[0] in ("model", "optim")}
    else:
        paths = {key: ("model", name) for key, name in model_of(metadata).items()}
    flat = {key: allocated(metadata.state_dict_metadata[key]) for key in paths}
    sizes = {key: 0 if value is None else value.nbytes for key, value in flat.items()}
    for key in watched(flat, f"reading {folder.name}", sizes.__getitem__, sum(sizes.values())):
        one: dict[str, Any] = {key: flat[key]}
        read(KnownReader(folder, metadata), one, ALONE, partial(flat.update, one))
    _write_torch_file(unflatten_state_dict(flat, paths), out)
    return folder


def from_torch_file(file: Path, dir: Path, step: int | None = None) -> Path:
    """Saves the content of a file by `torch.save` as a step in `dir`; returns the step folder."""
    state = load_file(file)
    for group in state.get("optim", {}).get("param_groups", ()):
        if any(isinstance(name, int) for name in group["params"]):
            raise ValueError(f"{file}: optimizer state goes by parameter ids; it must go by names")
    return _save_step(state, of_state(file, state), dir, step)


def to_step(path: Path, dir: Path, step: int | None = None) -> Path:
    """Saves the model of safetensors files or a folder of DCP's as a step in `dir`; returns its folder."""
    if path.is_dir() and not is_safetensors(path):
        refuse_parent(path)
        if not is_foreign(folder := find(path, None)):
            raise ValueError(
                f"{folder} is a step folder already: --to torch or safetensors makes another thing of it"
            )
    source = open_source(path)
    return _save_step({"model": dict(source.tensors("reading"))}, source, dir, step)


def to_torch_file_from(path: Path, out: Path) -> Path:
    """Writes the model of safetensors files as one file by `torch.save`; returns where they lie."""
    _require_new(out)
    _write_torch_file({"model": dict(open_source(path).tensors("reading"))}, out)
    return path


def export(
    path: Path,
    out: Path,
    step: int | None = None,
    max_shard_bytes: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Writes a model's tensors as safetensors files with Hugging Face's index; holds one at a time."""
    if out.resolve() == path.resolve() or out.is_file():
        raise ValueError(f"{out} cannot be written to: name another folder")
    source = open_source(path, step)

    def wanted(own: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and own.is_floating_point else own

    def values(doing: str) -> Iterator[Named]:
        return ((name, value.to(wanted(value.dtype))) for name, value in source.tensors(doing))

    described = {name: (shape, wanted(own)) for name, (shape, own) in source.described.items()}
    files = write_safetensors(out, described, values("writing"), max_shard_bytes=max_shard_bytes)
    written = read_safetensors(out)
    _require_same(values("verifying"), {name: value.whole for name, value in written.items()}, out)
    return files


def _save_step(state: dict[str, Any], source: Source, dir: Path, step: int | None) -> Path:
    if dir.is_file():
        raise ValueError(f"{dir} is a file; a step lies in a folder: name one")
    folder = SharedSave(
        parent=dir, team=ALONE, state=state, step=step, progress=True, patience=PATIENCE
    ).write()
    verified(ALONE, folder, verifying)
    saved = open_source(folder)
    _require_same(
        source.tensors("verifying"), {name: partial(saved.read, name) for name in saved.described}, folder
    )
    return folder


def _require_new(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists already: name another file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")


def _write_torch_file(state: dict[str, Any], out: Path) -> None:
    write_file(state, out)
    written = torch.load(out, mmap=True, weights_only=True)
    if other := [*_differing(state, written)]:
        raise _unlike(out, other)


def _differing(value: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yields the names of entries that differ between two nested states."""
    if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
        for key in value:
            yield from _differing(value[key], other[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, torch.Tensor):
        if not (isinstance(other, torch.Tensor) and _is_same(value, other)):
            yield name
    elif isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)) and len(value) == len(other):
        for index, (each, its) in enumerate(zip(value, other)):
            yield from _differing(each, its, f"{name}[{index}]")
    elif type(value) is not type(other) or (value != other and value == value):
        yield name


def _require_same(values: Iterator[Named], written: Mapping[str, Any], place: Path) -> None:
    """Reads tensors back one at a time, and raises a RuntimeError that names those that differ."""
    other = [name for name, value in values if name not in written or not _is_same(value, written[name]())]
    if other:
        raise _unlike(place, other)


def _unlike(place: Path, other: Sequence[str]) -> RuntimeError:
    return RuntimeError(f"{place} was written, and holds other values of {listed(other)}: do not use it")


def _is_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: a NaN is the same as itself."""
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if value.layout != torch.strided or other.layout != torch.strided:
        return value.layout == other.layout
    rows = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (value, other)]
    return torch.equal(*rows)
