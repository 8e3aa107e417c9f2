"""Conversions of checkpoints in one process, without a model; each is read back and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_wrap._core import listed
from fsdp_wrap.checkpoint._contents import Source
from fsdp_wrap.checkpoint._loading import verified
from fsdp_wrap.checkpoint._places.folder import Folder
from fsdp_wrap.checkpoint._safetensors import PATIENCE, read_safetensors, write_safetensors
from fsdp_wrap.checkpoint._saving import SharedSave
from fsdp_wrap.checkpoint._sources import open_source, opened, tensors, verifying, watched
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, read, write_file
from fsdp_wrap.checkpoint._team import ALONE
from fsdp_wrap.checkpoint._torch_private import unflatten_state_dict

_BESIDE_CODES = ".quant_state.bitsandbytes__"
"""What follows the name of a weight in an entry that tells how its codes were made."""


def step_to_torch_file(dir: Path, out: Path, step: int | None = None) -> Path:
    """Writes full model and optimizer state as one file that `torch.load(weights_only=True)` reads.

    Extras and random states, which may be anything, are left out. All of it is in memory meanwhile.
    """
    _require_new(out)
    folder, metadata = opened(dir, step)
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] in ("model", "optim")}
    flat = {key: allocated(metadata.state_dict_metadata[key]) for key in paths}
    sizes = {key: 0 if value is None else value.nbytes for key, value in flat.items()}
    for key in watched(flat, f"reading {folder.name}", sizes.__getitem__, sum(sizes.values())):
        one: dict[str, Any] = {key: flat[key]}
        read(KnownReader(folder, metadata), one, ALONE, partial(flat.update, one))
    _write_torch_file(unflatten_state_dict(flat, paths), out)
    return folder


def to_torch_file(source: Source, out: Path) -> None:
    """Writes a model as one file by `torch.save`, under `model`."""
    _require_new(out)
    _write_torch_file({"model": _model(source)}, out)
    written = torch.load(out, mmap=True, weights_only=True)["model"]
    readers = {name: partial(written.__getitem__, name) for name in written if torch.is_tensor(written[name])}
    _require_all(source, readers, out)


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
    state = {"model": _model(source), **more}
    save = SharedSave(place=Folder(dir), team=ALONE, state=state, step=step, progress=True, patience=PATIENCE)
    folder = save.write()
    verified(ALONE, folder, verifying)
    saved = open_source(folder)
    names = saved.bare().names
    _require_all(source, {name: partial(saved.held.read, keys) for keys, name in names.items()}, folder)
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
    files = write_safetensors(
        out,
        described,
        ((name, value.to(wanted(value.dtype))) for name, value in tensors(source, "writing")),
        max_shard_size=max_shard_size,
    )
    written = read_safetensors(out)
    _require_all(source, {name: value.whole for name, value in written.items()}, out, wanted)
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


def _model(source: Source) -> dict[str, Any]:
    """Returns a model's tensors and the extra states of its modules."""
    extra = {keys: name for keys, name in source.names.items() if source.held.entries[keys] is None}
    return dict(tensors(source, "reading")) | {name: source.held.read(keys) for keys, name in extra.items()}


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
    source: Source,
    written: Mapping[str, Callable[[], torch.Tensor]],
    place: Path,
    wanted: Callable[[torch.dtype], torch.dtype] = lambda own: own,
) -> None:
    """Reads tensors back one at a time: each of the checkpoint's must be there, under a name of its own.

    Raises:
        RuntimeError: With the names of those that differ, are missing, or stand for several.
    """
    taken = Counter(source.bare().names.values())
    other = [name for name, count in taken.items() if count > 1]
    other += taken.keys() - written.keys()
    for name, value in tensors(source, "verifying"):
        if name in written and not _is_same(value.to(wanted(value.dtype)), written[name]()):
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
