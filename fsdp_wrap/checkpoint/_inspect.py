"""What lies in checkpoint folders, told without a model or a process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap.checkpoint._folders import find, lack_of, steps_in
from fsdp_wrap.checkpoint._loading import refuse_damaged, refuse_damaged_metadata
from fsdp_wrap.checkpoint._manifest import DamagedCheckpoint, Manifest, read_metadata

__all__ = ["described", "listed"]


def listed(dir: Path, verify: bool) -> tuple[list[str], bool]:
    """Returns a line for each step, newest last, and whether all are as they were written.

    Args:
        dir: Of steps, or a step folder.
        verify: Read every byte; otherwise names and sizes count.
    """
    steps = sorted(steps_in(dir).items())
    lines, fine = [], True
    for folder in [path for _, path in steps] or [dir]:
        lack = lack_of(folder)
        if lack is None and verify:
            try:
                refuse_damaged(folder)
            except DamagedCheckpoint as error:
                lack = "\n".join(str(error).splitlines()[1:-1]).strip()
        fine = fine and lack is None
        condition = _condition(folder, verify) if lack is None else f"incomplete: {lack}"
        lines.append(f"{folder.name}  {condition}")
    return lines, fine


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
    refuse_damaged_metadata(folder, manifest)
    metadata = read_metadata(folder)
    yield f"{folder} (written by torch {manifest.versions.get('torch')})"
    yield from _model(metadata)
    yield from _optimizer(metadata)
    yield from _extra(metadata)
    yield f"total: {_size(manifest.size)} in {len(manifest.files)} files"


def _condition(folder: Path, verified: bool) -> str:
    manifest = Manifest.read(folder)
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    return f"{'intact' if verified else 'complete'}, by {ranks}, {_size(manifest.size)}"


def _model(metadata: Metadata) -> Iterator[str]:
    keys = _keys(metadata, "model")
    entries = {key: metadata.state_dict_metadata[key] for key in keys}
    yield f"model: {len(keys)} entries, {_size(sum(map(_bytes, entries.values())))}"
    width = max((len(key) for key in keys), default=0) - len("model.")
    for key, entry in entries.items():
        name = key.removeprefix("model.").ljust(width)
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            yield f"  {name}  {dtype} {list(entry.size)}  {_size(_bytes(entry))}"
        else:
            yield f"  {name}  pickled"


def _optimizer(metadata: Metadata) -> Iterator[str]:
    kinds: dict[str, list[int]] = {}
    groups = set()
    for path in _keys(metadata, "optim").items():
        key, parts = path
        if parts[1] == "state":
            kinds.setdefault(str(parts[-1]), []).append(_bytes(metadata.state_dict_metadata[key]))
        else:
            groups.add(parts[2])
    if kinds or groups:
        yield f"optimizer: {len(groups)} parameter groups, {_size(sum(map(sum, kinds.values())))}"
    for kind, sizes in kinds.items():
        yield f"  {kind}: of {len(sizes)} parameters, {_size(sum(sizes))}"


def _extra(metadata: Metadata) -> Iterator[str]:
    lengths = {index.fqn: place.length for index, place in metadata.storage_data.items()}
    sizes: dict[str, list[int]] = {}
    for part in ("extra", "random"):
        for key, path in _keys(metadata, part).items():
            sizes.setdefault(str(path[2]) if part == "extra" else "(random states)", []).append(lengths[key])
    if sizes:
        yield "extra:"
    for name, of_ranks in sizes.items():
        yield f"  {name}: of {len(of_ranks)} ranks, {_size(sum(of_ranks))}"


def _keys(metadata: Metadata, part: str) -> dict[str, Any]:
    return {key: path for key, path in metadata.planner_data.items() if path[0] == part}


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
