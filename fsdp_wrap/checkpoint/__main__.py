"""`python -m fsdp_wrap.checkpoint inspect|convert|export`: checkpoints looked at without training.

Ends with 0, with 1 where a checkpoint is damaged or cannot be read or written, and with 2 on wrong input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp_wrap.checkpoint import _convert, _inspect
from fsdp_wrap.checkpoint._folders import steps_in

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
    lines, fine = zip(*(_inspect.condition(folder, options.verify) for folder in folders))
    print("\n".join(lines))
    print("\n".join(_inspect.described(options.source, options.step)))
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


if __name__ == "__main__":
    sys.exit(main())
