"""What lies in checkpoint folders, told without a model or a process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap.checkpoint._folders import find, lack_of
from fsdp_wrap.checkpoint._loading import refuse
from fsdp_wrap.checkpoint._manifest import METADATA, Manifest, entries_of, read_metadata, told, verify

__all__ = ["condition", "described"]


def condition(folder: Path, every_byte: bool) -> tuple[str, bool]:
    """Returns a line on a step folder, and whether it is as it was written.

    Args:
        folder: The step's.
        every_byte: Read all of it; otherwise names and sizes count.
    """
    lack = lack_of(folder)
    if lack is None:
        manifest = Manifest.read(folder)
        lack = "\n  ".join(told(folder, manifest.faults(folder))) if every_byte else None
    if lack:
        return f"{folder.name}  incomplete: {lack}", False
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    found = "intact" if every_byte else "complete"
    return f"{folder.name}  {found}, by {ranks}, {_size(manifest.size)}", True


def described(dir: Path, step: int | None) -> Iterator[str]:
    """Yields lines on the content of one step.

    Args:
        dir: Of steps, or a step folder.
        step: Which one; None for the newest complete one.

    Raises:
        DamagedCheckpoint: If its list of content is missing or damaged.
        ValueError: If there is no such step.
    """
    folder = find(dir, step)
    manifest = Manifest.read(folder)
    pieces = (piece for piece in manifest.pieces() if piece.file == METADATA)
    if faults := [*verify(folder, pieces)]:
        refuse(folder, told(folder, faults))
    metadata = read_metadata(folder)
    yield f"{folder} (written by torch {manifest.versions.get('torch')})"
    yield from _model(metadata)
    yield from _optimizer(metadata)
    yield from _extra(metadata)
    yield f"total: {_size(manifest.size)} in {len(manifest.files)} files"


def _model(metadata: Metadata) -> Iterator[str]:
    entries = {
        key.removeprefix("model."): metadata.state_dict_metadata[key] for key in entries_of(metadata, "model")
    }
    yield f"model: {len(entries)} entries, {_size(sum(map(_bytes, entries.values())))}"
    width = max(map(len, entries), default=0)
    for name, entry in entries.items():
        name = name.ljust(width)
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            yield f"  {name}  {dtype} {list(entry.size)}  {_size(_bytes(entry))}"
        else:
            yield f"  {name}  pickled"


def _optimizer(metadata: Metadata) -> Iterator[str]:
    paths = entries_of(metadata, "optim")
    groups = {path[:3] for path in paths.values() if path[1] == "param_groups"}
    state = [
        (str(path[-1]), _bytes(metadata.state_dict_metadata[key]))
        for key, path in paths.items()
        if path[1] == "state"
    ]
    if paths:
        yield f"optimizer: {len(groups)} parameter groups, {_size(sum(size for _, size in state))}"
    yield from _summed(state, "parameters")


def _extra(metadata: Metadata) -> Iterator[str]:
    lengths = {index.fqn: place.length for index, place in metadata.storage_data.items()}
    extra = [(str(path[2]), lengths[key]) for key, path in entries_of(metadata, "extra").items()]
    random = [("(random states)", lengths[key]) for key in entries_of(metadata, "random")]
    if extra or random:
        yield "extra:"
    yield from _summed([*extra, *random], "ranks")


def _summed(sizes: Iterable[tuple[str, int]], owners: str) -> Iterator[str]:
    """Yields a line on each name, with how many owners have it and the bytes of all."""
    by_name: dict[str, list[int]] = {}
    for name, size in sizes:
        by_name.setdefault(name, []).append(size)
    for name, found in by_name.items():
        yield f"  {name}: of {len(found)} {owners}, {_size(sum(found))}"


def _bytes(entry: Any) -> int:
    if not isinstance(entry, TensorStorageMetadata):
        return 0
    return entry.size.numel() * entry.properties.dtype.itemsize


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
