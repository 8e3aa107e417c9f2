"""`python -m fsdp_wrap.checkpoint inspect|convert|export`: checkpoints looked at without training.

Ends with 0, with 1 where a checkpoint is damaged or cannot be read or written, and with 2 on wrong input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_wrap.checkpoint import _convert
from fsdp_wrap.checkpoint._folders import find, lack_of, steps_in
from fsdp_wrap.checkpoint._loading import refuse
from fsdp_wrap.checkpoint._manifest import METADATA, Manifest, entries_of, read_metadata, told, verify

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp_wrap.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="inspect|convert|export")
    inspect = commands.add_parser("inspect", help="list steps and what the newest complete one holds")
    inspect.add_argument("--verify", action="store_true", help="read every byte of every step")
    inspect.set_defaults(run=_run_inspect)
    convert = commands.add_parser("convert", help="to one torch.save file, or back")
    convert.set_defaults(run=_run_convert)
    export = commands.add_parser("export", help="the model as safetensors files")
    export.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="such as 5GB or 500MiB")
    export.set_defaults(run=_run_export)
    for command, source in ((inspect, "DIR"), (convert, "DIR|FILE"), (export, "DIR")):
        command.add_argument("source", type=Path, metavar=source, help="folder of steps, or one step's")
        command.add_argument("--step", type=int, metavar="N", help="which step, instead of the newest")
    for command, default in ((convert, "DIR.pt"), (export, "DIR_safetensors")):
        command.add_argument("out", type=Path, nargs="?", metavar="OUT", help=f"{default} if left out")
    return parser


def _run_inspect(options: argparse.Namespace) -> int:
    if not options.source.is_dir():
        raise ValueError(f"there is no folder {options.source}")
    folders = [*reversed(steps_in(options.source).values())] or [options.source]
    lines, fine = zip(*(_condition(folder, options.verify) for folder in folders))
    print(*lines, sep="\n")
    print(*_described(options.source, options.step), sep="\n")
    return int(options.verify and not all(fine))


def _run_convert(options: argparse.Namespace) -> int:
    if options.source.is_file():
        out = options.out or options.source.with_suffix("")
        print(f"wrote {_convert.from_torch_file(options.source, out, options.step)}")
    else:
        out = options.out or _beside(options.source, ".pt")
        folder = _convert.to_torch_file(options.source, out, options.step)
        print(f"wrote model and optimizer of {folder} (extras and random states left out) to {out}")
    return 0


def _run_export(options: argparse.Namespace) -> int:
    out = options.out or _beside(options.source, "_safetensors")
    files = _convert.export(options.source, out, options.step, options.max_shard_size)
    print(f"wrote {', '.join(files)} in {out}")
    return 0


def _beside(folder: Path, ending: str) -> Path:
    folder = folder.resolve()
    return folder.with_name(folder.name + ending)


# what `inspect` tells


def _condition(folder: Path, every_byte: bool) -> tuple[str, bool]:
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


def _described(dir: Path, step: int | None) -> Iterator[str]:
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


if __name__ == "__main__":
    sys.exit(main())
