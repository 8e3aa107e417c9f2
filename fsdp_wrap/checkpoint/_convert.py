"""Step folders into single files and back, in one process and without a model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap._core.torch_private import unflatten_state_dict
from fsdp_wrap.checkpoint._folders import find
from fsdp_wrap.checkpoint._loading import verified
from fsdp_wrap.checkpoint._manifest import entries_of, read_metadata
from fsdp_wrap.checkpoint._safetensors import write_safetensors
from fsdp_wrap.checkpoint._saving import SharedSave
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, read, write_file
from fsdp_wrap.checkpoint._team import ALONE


def to_torch_file(dir: Path, out: Path, step: int | None = None) -> Path:
    """Writes model and optimizer state, full, as one file that `torch.load(weights_only=True)` reads.

    Extras and random states, which may be anything, are left out.

    Args:
        dir: Of steps, or a step folder.
        out: The file, which must not exist.
        step: Which one; None for the newest complete one.

    Returns:
        The step folder.

    Raises:
        DamagedCheckpoint: If the checkpoint is not as it was written.
        RuntimeError: If an entry, such as a module's extra state, is no plain value.
        ValueError: If there is no such step, or `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: name another file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")
    folder, metadata = _opened(dir, step)
    flat = {
        key: allocated(metadata.state_dict_metadata[key])
        for key, path in metadata.planner_data.items()
        if path[0] in ("model", "optim")
    }
    read(KnownReader(folder, metadata), flat, ALONE)
    write_file(unflatten_state_dict(flat, metadata.planner_data), out)
    return folder


def from_torch_file(file: Path, dir: Path, step: int | None = None) -> Path:
    """Saves what a file holds as a step in `dir`; returns the step folder.

    Args:
        file: By `to_torch_file`, or a model's state dict by `torch.save`.
        dir: Of steps; made if it does not exist.
        step: Its number; None for one after the newest.

    Raises:
        ValueError: If the file is none of these.
    """
    try:
        state = torch.load(file, mmap=True, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is no file that torch.load(weights_only=True) reads: {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file} holds no state dict")
    if not (set(state) <= {"model", "optim"} and isinstance(state.get("model"), Mapping)):
        if not any(isinstance(value, torch.Tensor) for value in state.values()):
            raise ValueError(f"{file} holds neither 'model' (and 'optim') nor a model's state dict")
        state = {"model": dict(state)}
    for group in state.get("optim", {}).get("param_groups", ()):
        if any(isinstance(name, int) for name in group["params"]):
            raise ValueError(f"{file}: optimizer state goes by parameter ids; it must go by names")
    return SharedSave(parent=dir, team=ALONE, state=dict(state), step=step).write()


def export(dir: Path, out: Path, step: int | None = None, max_shard_bytes: int | str = "5GB") -> list[str]:
    """Writes the model's tensors as safetensors files with Hugging Face's index; holds one at a time.

    Args:
        dir: Of steps, or a step folder.
        out: A folder; made if it does not exist.
        step: Which one; None for the newest complete one.
        max_shard_bytes: The most bytes of tensors in one file.

    Returns:
        The names of the files with tensors.

    Raises:
        DamagedCheckpoint: If the checkpoint is not as it was written.
        ValueError: If there is no such step, or safetensors has no such dtype.
    """
    folder, metadata = _opened(dir, step)
    every = metadata.state_dict_metadata
    entries = {
        key: entry
        for key in entries_of(metadata, "model")
        if isinstance(entry := every[key], TensorStorageMetadata)
    }

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for key, entry in entries.items():
            flat: dict[str, Any] = {key: allocated(entry)}
            read(KnownReader(folder, metadata), flat, ALONE)
            yield key.removeprefix("model."), flat[key]

    described = {
        key.removeprefix("model."): (entry.size, entry.properties.dtype) for key, entry in entries.items()
    }
    return write_safetensors(out, described, values(), max_shard_bytes=max_shard_bytes)


def _opened(dir: Path, step: int | None) -> tuple[Path, Metadata]:
    """Verifies a step folder, and returns it with what `torch.distributed.checkpoint` knows of it."""
    folder = find(dir, step)
    verified(ALONE, folder)
    return folder, read_metadata(folder)
