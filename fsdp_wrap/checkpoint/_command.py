"""The commands on checkpoints: `inspect`, `convert` and `export`.

Each ends with 0, with 1 where a checkpoint is damaged or cannot be read or written, with 2 on wrong input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap._core import format_bytes, format_dtype
from fsdp_wrap.checkpoint import _convert
from fsdp_wrap.checkpoint._folders import find, lack_of, steps_in
from fsdp_wrap.checkpoint._loading import refuse
from fsdp_wrap.checkpoint._manifest import (
    METADATA,
    Manifest,
    entries_of,
    format_faults,
    read_metadata,
    verify,
)
from fsdp_wrap.checkpoint._safetensors import Described, nbytes
from fsdp_wrap.checkpoint._sources import (
    Source,
    described_in,
    is_foreign,
    is_safetensors,
    lacks_of_foreign,
    model_of,
    open_source,
    refuse_parent,
    require_there,
    verifying,
)

_KINDS = ("step", "torch", "safetensors")
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    **{name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")},
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `python -m fsdp_wrap.checkpoint`."""
    made = argparse.ArgumentParser(prog="python -m fsdp_wrap.checkpoint", description=__doc__)
    add_commands(made)
    return made


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds the commands to a parser; parsed options have the command's function as `run`."""
    commands = parser.add_subparsers(required=True, metavar="inspect|convert|export")
    inspect = commands.add_parser("inspect", help="list steps, and what the newest complete one holds")
    inspect.add_argument("--verify", action="store_true", help="read every byte of every step")
    inspect.add_argument("--json", action="store_true", help="print one step's content as JSON")
    inspect.set_defaults(run=_run_inspect)
    convert = commands.add_parser("convert", help="a checkpoint of one kind into another")
    convert.add_argument(
        "--to",
        choices=_KINDS,
        help="a step in a folder of steps, a file for torch.load, or safetensors; if left out, a file "
        "becomes a step, and a folder a file",
    )
    convert.set_defaults(run=_run_convert)
    export = commands.add_parser("export", help="the model as safetensors files")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="such as 5GB or 500MiB")
    export.add_argument("--dtype", choices=_DTYPES, help="cast floating-point tensors to this")
    export.set_defaults(run=_run_export)
    for command in (inspect, convert, export):
        source = "folder of steps, one step's, one of torch.distributed.checkpoint, safetensors, or a file"
        command.add_argument("source", type=Path, metavar="PATH", help=source)
        command.add_argument("--step", type=int, metavar="N", help="which step, instead of the newest")
    for command, default in ((convert, "beside PATH"), (export, "PATH_safetensors")):
        command.add_argument("out", type=Path, nargs="?", metavar="OUT", help=f"{default} if left out")


def _run_inspect(options: argparse.Namespace) -> int:
    path: Path = options.source
    if path.is_file() or is_safetensors(path):
        return _tell_source(open_source(path, options.step), options.json)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    refuse_parent(path)
    if options.json:
        print(json.dumps(_as_json(path, options.step), indent=1))
        return 0
    folders = [*reversed(steps_in(path).values())] or [path]
    lines, fine = zip(*(_condition(folder, options.verify) for folder in folders))
    print(*lines, sep="\n")
    print(*_described(path, options.step), sep="\n")
    return int(options.verify and not all(fine))


def _run_convert(options: argparse.Namespace) -> int:
    source: Path = options.source
    require_there(source)
    if options.to == "safetensors":
        return _run_export(options)
    is_file, tensors_only = source.is_file(), is_safetensors(source)
    to = options.to or ("step" if is_file or tensors_only else "torch")
    if to == "step":
        out = options.out or (source.with_suffix("") if is_file else _beside(source, "_steps"))
        made = _convert.to_step if tensors_only or not is_file else _convert.from_torch_file
        print(f"wrote {made(source, out, options.step)}, and read it back")
        return 0
    out = options.out or _beside(source, ".pt")
    if tensors_only:
        folder, held = _convert.to_torch_file_from(source, out), "the model"
    elif is_file:
        raise ValueError(f"{source} is a file for torch.load already: --to step or safetensors")
    else:
        folder = _convert.to_torch_file(source, out, options.step)
        held = "model and optimizer (extras and random states left out)"
    print(f"wrote {held} of {folder} to {out}, and read it back")
    return 0


def _run_export(options: argparse.Namespace) -> int:
    out = options.out or _beside(options.source, "_safetensors")
    given = vars(options)
    most, dtype = given.get("max_shard_size", "5GB"), _DTYPES.get(given.get("dtype") or "")
    files = _convert.export(options.source, out, options.step, most, dtype)
    print(f"wrote {', '.join(files)} in {out}, and read them back")
    return 0


def _beside(path: Path, ending: str) -> Path:
    path = path.resolve()
    return path.with_name((path.stem if path.is_file() else path.name) + ending)


def _tell_source(source: Source, as_json: bool) -> int:
    if as_json:
        told = {"kind": source.kind, "path": str(source.place), "model": _tensors_as_json(source.described)}
        print(json.dumps(told, indent=1))
        return 0
    print(f"{source.place}: {source.kind}")
    print(*_entries([*source.described, *source.left_out], source.described, "no tensor"), sep="\n")
    return 0


def _tensors_as_json(described: Described) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": [*shape], "dtype": format_dtype(dtype), "bytes": nbytes(shape, dtype)}
        for name, (shape, dtype) in described.items()
    }


def _entries(names: Sequence[str], described: Described, others: str) -> Iterator[str]:
    """Yields a line on a model, and one on each entry; entries that are no tensors are called `others`."""
    yield f"model: {len(names)} entries, {format_bytes(sum(itertools.starmap(nbytes, described.values())))}"
    width = max(map(len, names), default=0)
    for name in names:
        told = others
        if name in described:
            shape, dtype = described[name]
            told = f"{format_dtype(dtype)} {list(shape)}  {format_bytes(nbytes(shape, dtype))}"
        yield f"  {name.ljust(width)}  {told}"


# what `inspect` tells


def _condition(folder: Path, every_byte: bool) -> tuple[str, bool]:
    """Returns a line on a step folder, and whether it is as it was written."""
    if is_foreign(folder):
        lacks = "; ".join(lacks_of_foreign(folder, read_metadata(folder)))
        fine = "all its files are there; it has no checksums" if not lacks else f"incomplete: {lacks}"
        return f"{folder.name}  by torch.distributed.checkpoint, {fine}", not lacks
    lack = lack_of(folder)
    if lack is None:
        manifest = Manifest.read(folder)
        if every_byte:
            lack = "\n  ".join(format_faults(folder, manifest.faults(folder, shown=verifying)))
    if lack:
        return f"{folder.name}  incomplete: {lack}", False
    ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
    found = "intact" if every_byte else "complete"
    return f"{folder.name}  {found}, by {ranks}, {format_bytes(manifest.size)}", True


def _described(dir: Path, step: int | None) -> Iterator[str]:
    """Yields lines on the content of one step."""
    folder, manifest, metadata = _looked_at(dir, step)
    if manifest is None:
        yield f"{folder} (by torch.distributed.checkpoint)"
        yield from _model(metadata)
        return
    yield f"{folder} (written by torch {manifest.versions.get('torch')})"
    yield from _model(metadata)
    yield from _optimizer(metadata)
    yield from _extra(metadata)
    yield f"total: {format_bytes(manifest.size)} in {len(manifest.files)} files"


def _looked_at(dir: Path, step: int | None) -> tuple[Path, Manifest | None, Metadata]:
    """Returns one step's folder, manifest (None for one of DCP's) and DCP's metadata."""
    folder = find(dir, step)
    if is_foreign(folder):
        return folder, None, read_metadata(folder)
    manifest = Manifest.read(folder)
    pieces = (piece for piece in manifest.pieces() if piece.file == METADATA)
    if faults := [*verify(folder, pieces)]:
        refuse(folder, format_faults(folder, faults))
    return folder, manifest, read_metadata(folder)


def _as_json(dir: Path, step: int | None) -> dict[str, Any]:
    folder, manifest, metadata = _looked_at(dir, step)
    model = _tensors_as_json(described_in(metadata)[0])
    found: dict[str, Any] = {"path": str(folder), "model": model}
    if manifest is None:
        return {"kind": "torch.distributed.checkpoint", **found}
    written = {"step": manifest.step, "world_size": manifest.world_size, "versions": manifest.versions}
    return {"kind": "step", **written, "bytes": manifest.size, "complete": lack_of(folder) is None, **found}


def _model(metadata: Metadata) -> Iterator[str]:
    return _entries([*model_of(metadata).values()], described_in(metadata)[0], "pickled")


def _optimizer(metadata: Metadata) -> Iterator[str]:
    paths = entries_of(metadata, "optim")
    groups = {path[:3] for path in paths.values() if path[1] == "param_groups"}
    state = [
        (str(path[-1]), _bytes(metadata.state_dict_metadata[key]))
        for key, path in paths.items()
        if path[1] == "state"
    ]
    if paths:
        yield f"optimizer: {len(groups)} parameter groups, {format_bytes(sum(size for _, size in state))}"
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
        yield f"  {name}: of {len(found)} {owners}, {format_bytes(sum(found))}"


def _bytes(entry: Any) -> int:
    return nbytes(entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else 0
