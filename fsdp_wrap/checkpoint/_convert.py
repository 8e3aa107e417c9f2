"""Conversions of checkpoints in one process, without a model; each is read back and compared."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._contents import Source
from fsdp_wrap.checkpoint._loading import verified
from fsdp_wrap.checkpoint._places.folder import Folder
from fsdp_wrap.checkpoint._safetensors import (
    PATIENCE,
    Named,
    bytes_of,
    nbytes,
    read_safetensors,
    write_safetensors,
)
from fsdp_wrap.checkpoint._saving import SharedSave
from fsdp_wrap.checkpoint._sources import open_source, opened, read_entries, tensors, verifying, watched
from fsdp_wrap.checkpoint._storage import allocated, write_file
from fsdp_wrap.checkpoint._team import ALONE
from fsdp_wrap.checkpoint._torch_private import unflatten_state_dict

Sums = dict[str, tuple[object, ...]]
"""What tensors are, by name: shape, dtype, layout, and the sum of their bits."""

_BESIDE_CODES = ".quant_state.bitsandbytes__"
"""What follows the name of a weight in an entry that tells how its codes were made."""


def step_to_torch_file(dir: Path, out: Path, step: int | None = None) -> Path:
    """Writes full model and optimizer state as one file that `torch.load(weights_only=True)` reads.

    Extras and random states, which may be anything, are left out. All of it is in memory meanwhile.
    """
    _require_new(out)
    reader = opened(dir, step)
    folder, metadata = reader.folder, reader.metadata
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] in ("model", "optim")}
    flat = {key: allocated(metadata.state_dict_metadata[key]) for key in paths}
    sizes = {key: 0 if value is None else value.nbytes for key, value in flat.items()}
    offsets = {index.fqn: place.offset for index, place in reversed(metadata.storage_data.items())}
    in_order = sorted(flat, key=lambda key: offsets.get(key, 0))  # since a store gives what follows, too
    for key in watched(in_order, f"reading {folder.name}", sizes.__getitem__, sum(sizes.values())):
        one: dict[str, Any] = {key: flat[key]}
        read_entries(reader, one)
        flat |= one
    _write_torch_file(unflatten_state_dict(flat, paths), out)
    return folder


def to_torch_file(source: Source, out: Path) -> None:
    """Writes a model as one file by `torch.save`, under `model`."""
    _require_new(out)
    sums = Sums()
    _write_torch_file({"model": _model(source, sums)}, out)
    written = torch.load(out, mmap=True, weights_only=True)["model"]
    readers = {name: partial(written.__getitem__, name) for name in written if torch.is_tensor(written[name])}
    _require_all(source, sums, readers, out)


def to_step(source: Source, dir: Path, step: int | None = None, **more: Any) -> Path:
    """Saves a model, and more state, as a step in `dir`; returns the step folder."""
    if dir.is_file():
        raise ValueError(f"{dir} is a file; a step lies in a folder: name one")
    optim = more.get("optim", {})
    named = [name for group in optim.get("param_groups", ()) for name in group["params"]]
    if any(isinstance(name, int) for name in [*named, *optim.get("state", ())]):
        raise ValueError(
            f"{source.held.place}: optimizer state goes by parameter ids; it must go by names. "
            "--model model takes the model alone"
        )
    sums = Sums()
    state = {"model": _model(source, sums), **more}
    save = SharedSave(place=Folder(dir), team=ALONE, state=state, step=step, progress=True, patience=PATIENCE)
    folder = save.write()
    verified(ALONE, folder, verifying)
    saved = open_source(folder)
    names = saved.bare().names
    readers = {name: partial(saved.held.read, keys) for keys, name in names.items()}
    _require_all(source, sums, readers, folder)
    return folder


def export(
    source: Source, out: Path, max_shard_size: int | str = "5GB", dtype: torch.dtype | None = None
) -> list[str]:
    """Writes a model's tensors as safetensors files with Hugging Face's index; holds one tensor at a time."""
    if out.resolve() == source.held.place.resolve() or out.is_file():
        raise ValueError(f"{out} cannot be written to: name another folder")
    if dtype is not None:
        _refuse_codes(source)

    def wanted(own: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and own.is_floating_point else own

    described = {name: (shape, wanted(own)) for name, (shape, own) in source.described.items()}
    sums = Sums()
    cast = ((name, value.to(wanted(value.dtype))) for name, value in tensors(source, "writing"))
    files = write_safetensors(out, described, _noted(cast, sums), max_shard_size=max_shard_size)
    written = read_safetensors(out)
    _require_all(source, sums, {name: value.whole for name, value in written.items()}, out)
    return files


def _refuse_codes(source: Source) -> None:
    """Refuses to cast codes of weights, which would mean other values then, and their scales."""
    for name in source.described:
        weight, coded, _ = name.partition(_BESIDE_CODES)
        if coded:
            raise ValueError(
                f"'{weight}' in {source.held.place} holds codes of bitsandbytes, which keep their dtype: "
                "export without --dtype, or write the numbers of the sharded model by export_safetensors"
            )


def _model(source: Source, sums: Sums) -> dict[str, Any]:
    """Returns a model's tensors and the extra states of its modules; notes what the tensors are."""
    extra = {keys: name for keys, name in source.names.items() if source.held.entries[keys] is None}
    values: dict[str, Any] = dict(_noted(tensors(source, "reading"), sums))
    return values | {name: source.held.read(keys) for keys, name in extra.items()}


def _noted(values: Iterable[Named], sums: Sums) -> Iterator[Named]:
    """Yields tensors, and notes what each is, so that nothing is read again to compare it."""
    for name, value in values:
        sums[name] = _sum_of(value)
        yield name, value
        del value


def _sum_of(value: torch.Tensor) -> tuple[object, ...]:
    """Returns shape, dtype, layout and CRC-32 of the bits, so that a NaN equals itself."""
    is_strided = value.layout is torch.strided
    crc = zlib.crc32(bytes_of(value.detach().contiguous())) if is_strided else None
    return value.shape, value.dtype, value.layout, crc


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
        for index, (own, its) in enumerate(zip(value, other)):
            yield from _differing(own, its, f"{name}[{index}]")
    elif type(value) is not type(other) or (value != other and value == value):
        yield name


def _require_all(
    source: Source, sums: Sums, written: Mapping[str, Callable[[], torch.Tensor]], place: Path
) -> None:
    """Reads tensors back one at a time: each of the checkpoint's must be there, under a name of its own.

    Raises:
        RuntimeError: With the names of those that differ, are missing, or stand for several.
    """
    described = source.bare().described
    sizes = {name: nbytes(*described[name]) for name in sums}
    taken = Counter(source.bare().names.values())
    other = [name for name, count in taken.items() if count > 1]
    other += taken.keys() - written.keys()
    for name in watched(sums, f"verifying {place.name}", sizes.__getitem__, sum(sizes.values())):
        if name in written and _sum_of(written[name]()) != sums[name]:
            other.append(name)
    if other:
        raise _unlike(place, [*dict.fromkeys(other)])


def _unlike(place: Path, other: Sequence[str]) -> RuntimeError:
    return RuntimeError(f"{place} was written, and holds other values of {listed(other)}: do not use it")


def _is_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, so that a NaN equals itself."""
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    if value.layout != torch.strided or other.layout != torch.strided:
        return value.layout == other.layout
    rows = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (value, other)]
    return torch.equal(*rows)
