"""The commands on checkpoints: `inspect`, `convert` and `export`.

Each ends with 0, with 1 where a checkpoint is damaged or cannot be read or written, with 2 on wrong input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap._core import format_bytes, format_dtype
from fsdp_wrap.checkpoint import _convert
from fsdp_wrap.checkpoint._contents import Contents, Source, counted
from fsdp_wrap.checkpoint._hub import Described
from fsdp_wrap.checkpoint._loading import refuse
from fsdp_wrap.checkpoint._manifest import (
    METADATA,
    Manifest,
    entries_of,
    format_faults,
    read_metadata,
    verify,
)
from fsdp_wrap.checkpoint._places.place import lack_of
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._places.steps import disk_path, find, path_at, place_at
from fsdp_wrap.checkpoint._safetensors import nbytes
from fsdp_wrap.checkpoint._sources import (
    carried_of,
    is_foreign,
    is_own,
    is_safetensors,
    lacks_of_foreign,
    model_of,
    of_reader,
    open_held,
    refuse_parent,
    require_there,
    sources_in,
    verifying,
)
from fsdp_wrap.checkpoint._storage import KnownReader

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
        source = (
            "folder of steps, one step's, one of torch.distributed.checkpoint (or a URL of one of these), "
        )
        command.add_argument("source", type=_source, metavar="PATH", help=f"{source}safetensors, or a file")
        command.add_argument("--step", type=int, metavar="N", help="which step, instead of the newest")
        command.add_argument(
            "--model",
            metavar="NAME",
            help="where the model lies, such as actor or state_dict.model; '.' is the top level, 'NAME.*' is "
            "all that lies below a name",
        )
    for command, default in ((convert, "beside PATH"), (export, "PATH_safetensors")):
        command.add_argument(
            "out", type=_out, nargs="?", metavar="OUT", help=f"{default} if left out; of a URL in this folder"
        )


def _source(text: str) -> Path:
    try:
        path = path_at(text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path if "://" in text else Path(text)


def _out(text: str) -> Path:
    try:
        path = disk_path(text, "writing")
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path if "://" in text else Path(text)


def _run_inspect(options: argparse.Namespace) -> int:
    path: Path = options.source
    if path.is_file() or is_safetensors(path):
        return _tell(open_held(path, options.step), options)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    refuse_parent(path)
    if options.json:
        print(json.dumps(_as_json(path, options), indent=1))
        return 0
    folders = [*place_at(path).steps().values()][::-1] or [path]
    lines, fine = zip(*(_condition(folder, options.verify) for folder in folders))
    print(*lines, sep="\n")
    print(*_described(path, options), sep="\n")
    return int(options.verify and not all(fine))


def _run_convert(options: argparse.Namespace) -> int:
    path: Path = options.source
    require_there(path)
    if options.to == "safetensors":
        return _run_export(options)
    is_file, tensors_only = path.is_file(), is_safetensors(path)
    to = options.to or ("step" if is_file or tensors_only else "torch")
    is_ours = path.is_dir() and not tensors_only and not is_foreign(path)
    if is_ours and options.model is None:
        return _run_convert_step(options, to)
    if is_file and not tensors_only and to == "torch" and options.model is None:
        raise ValueError(f"{path} is a file for torch.load already: --to step or safetensors")
    held = open_held(path, options.step if is_ours else None)
    source = model_of(held, options.model)
    carried = carried_of(held) if to == "step" and options.model is None else {}
    _show(source, *carried)
    if to == "step":
        out = options.out or (path.with_suffix("") if is_file else _beside(path, "_steps"))
        written = _convert.to_step(source, out, options.step, **carried)
        print(f"wrote {written}, and read it back")
    else:
        out = options.out or _beside(path, ".pt")
        _convert.to_torch_file(source, out)
        print(f"wrote the model to {out}, and read it back")
    return 0


def _run_convert_step(options: argparse.Namespace, to: str) -> int:
    refuse_parent(options.source)
    if to == "step":
        folder = find(options.source, options.step)
        raise ValueError(
            f"{folder} is a step folder already: --to torch or safetensors makes another thing of it"
        )
    out = options.out or _beside(options.source, ".pt")
    folder = _convert.step_to_torch_file(options.source, out, options.step)
    held = "model and optimizer (extras and random states left out)"
    print(f"wrote {held} of {folder} to {out}, and read it back")
    return 0


def _run_export(options: argparse.Namespace) -> int:
    path: Path = options.source
    out = options.out or _beside(path, "_safetensors")
    given = vars(options)
    most, dtype = given.get("max_shard_size", "5GB"), _DTYPES.get(given.get("dtype") or "")
    source = model_of(open_held(path, options.step), options.model).bare()
    _show(source)
    files = _convert.export(source, out, most, dtype)
    print(f"wrote {', '.join(files)} in {out}, and read them back")
    return 0


def _show(source: Source, *carried: str) -> None:
    """Prints what is about to be written, and what of the checkpoint is left out."""
    described = source.described
    every = sum(kind is not None for kind in source.held.entries.values())
    size = format_bytes(sum(itertools.starmap(nbytes, described.values())))
    where = "the top level" if source.where == "." else source.where
    print(f"model: {where}, {len(described)} of {counted(every, 'tensor')}, {size}")
    if carried:
        print(f"also: {', '.join(carried)}")
    if left_out := source.left_out(*carried):
        print(f"left out: {', '.join(left_out)}")
    first = {name.partition(".")[0] for name in described if "." in name}
    if len(first) == 1 and all("." in name for name in described):
        prefix = first.pop()
        longer = prefix if source.where == "." else f"{source.where}.{prefix}"
        print(f"all names begin with {prefix}.: --model {shlex.quote(longer)} takes it off")
    sys.stdout.flush()


def _beside(path: Path, ending: str) -> Path:
    """Returns a path beside another one, or in the current folder if that one is in a store."""
    path = (Path(path.name) if isinstance(path, RemotePath) else path).resolve()
    return path.with_name((path.stem if path.is_file() else path.name) + ending)


def _tell(held: Contents, options: argparse.Namespace) -> int:
    if options.json:
        model = _tensors_as_json(model_of(held, options.model).described)
        print(json.dumps({"kind": held.kind, "path": str(held.place), "model": model}, indent=1))
        return 0
    print(f"{held.place}: {held.kind}")
    print(*_models(held, options.model), sep="\n")
    return 0


def _tensors_as_json(described: Described) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": [*shape], "dtype": format_dtype(dtype), "bytes": nbytes(shape, dtype)}
        for name, (shape, dtype) in described.items()
    }


def _models(held: Contents, wanted: str | None) -> Iterator[str]:
    """Yields a line on each model, and one on each of its entries; then one on what is in none of them."""
    sources = sources_in(held, wanted)
    if len(sources) > 1:
        yield f"{len(sources)} models: {', '.join(source.option for source in sources)}"
    for source in sources:
        yield from _entries(source, f"model {source.where}" if len(sources) > 1 else "model")
    if not is_own(held):
        names = {
            keys: name for source in sources for keys, name in [*source.names.items(), *source.others.items()]
        }
        if others := Source(held, "", names).left_out():
            yield f"no model's: {', '.join(others)}"


def _entries(source: Source, title: str) -> Iterator[str]:
    described, others = source.described, source.others.values()
    size = format_bytes(sum(itertools.starmap(nbytes, described.values())))
    yield f"{title}: {len(described) + len(others)} entries, {size}"
    width = max(map(len, [*described, *others]), default=0)
    for name, (shape, dtype) in described.items():
        told = f"{format_dtype(dtype)} {list(shape)}  {format_bytes(nbytes(shape, dtype))}"
        yield f"  {name.ljust(width)}  {told}"
    yield from (f"  {name.ljust(width)}  no tensor" for name in others)


# what `inspect` tells


def _condition(folder: Path, every_byte: bool) -> tuple[str, bool]:
    """Returns a line about a step folder, and whether the folder is as it was written."""
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
    verdict = "intact" if every_byte else "complete"
    return f"{folder.name}  {verdict}, by {ranks}, {format_bytes(manifest.size)}", True


def _described(dir: Path, options: argparse.Namespace) -> Iterator[str]:
    """Yields lines on the content of one step."""
    folder, manifest, metadata = _looked_at(dir, options.step)
    models = _models(of_reader(KnownReader(folder, metadata)), options.model)
    if manifest is None:
        yield f"{folder} (by torch.distributed.checkpoint)"
        yield from models
        return
    yield f"{folder} (written by torch {manifest.versions.get('torch')})"
    yield from models
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


def _as_json(dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder, manifest, metadata = _looked_at(dir, options.step)
    held = of_reader(KnownReader(folder, metadata))
    model = _tensors_as_json(model_of(held, options.model).described)
    common: dict[str, Any] = {"path": str(folder), "model": model}
    if manifest is None:
        return {"kind": "torch.distributed.checkpoint", **common}
    written = {"step": manifest.step, "world_size": manifest.world_size, "versions": manifest.versions}
    return {"kind": "step", **written, "bytes": manifest.size, "complete": lack_of(folder) is None, **common}


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
    """Yields a line for each name: how many owners have it, and their bytes in total."""
    by_name: dict[str, list[int]] = {}
    for name, size in sizes:
        by_name.setdefault(name, []).append(size)
    for name, own_sizes in by_name.items():
        yield f"  {name}: of {len(own_sizes)} {owners}, {format_bytes(sum(own_sizes))}"


def _bytes(entry: Any) -> int:
    return nbytes(entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else 0
