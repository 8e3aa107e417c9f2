"""`fsdp-wrap timeline merge|report|plot`: recordings of `fsdp_wrap.timeline`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fsdp_wrap.tools.progress import progress_bar
from fsdp_wrap.tools.timeline import Timeline, load


def add_commands(commands: Any) -> None:
    """Adds `timeline` with its own commands to the command line."""
    timeline = commands.add_parser(
        "timeline", help="merge, report or draw recordings of fsdp_wrap.timeline()", description=__doc__
    )
    inner = timeline.add_subparsers(required=True, metavar="merge|report|plot")
    merge = inner.add_parser("merge", help="merge the files of ranks into one trace, which Perfetto opens")
    merge.add_argument("--out", type=Path, default=Path("trace.json"), help="default: trace.json")
    merge.set_defaults(run=_run_merge)
    report = inner.add_parser("report", help="print the table by unit, with advice")
    report.set_defaults(run=_run_report)
    plot = inner.add_parser("plot", help="draw one step")
    plot.add_argument("--out", type=Path, default=Path("step.svg"), help="default: step.svg")
    plot.set_defaults(run=_run_plot)
    for command in (merge, report, plot):
        command.add_argument(
            "paths", type=Path, nargs="+", metavar="PATH", help="a trace, or the folder of a recording"
        )


def _run_merge(options: argparse.Namespace) -> int:
    if not options.out.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--out {options.out}: the name of a trace must end in .json or .json.gz")
    with progress_bar(task="merging"):
        merged = _read(options.paths)
        merged.save(options.out)
    count = len(merged.ranks)
    print(
        f"wrote {count} rank{'s' if count > 1 else ''} to {options.out}: open it at https://ui.perfetto.dev"
    )
    return 0


def _run_report(options: argparse.Namespace) -> int:
    with progress_bar(task="reading"):
        text = _read(options.paths).report()
    print(text)
    return 0


def _run_plot(options: argparse.Namespace) -> int:
    with progress_bar(task="drawing"):
        _read(options.paths).plot(options.out)
    print(f"wrote {options.out}")
    return 0


def _read(paths: list[Path]) -> Timeline:
    """Returns the timeline of all traces at the paths, and in folders at the paths.

    Raises:
        ValueError: If there is none, one is no trace of a timeline, or two are of one rank.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no file or folder of a timeline is at {path}")
        traces = sorted(path.glob("rank-*.json")) if path.is_dir() else [path]
        if not traces:
            raise ValueError(
                f"no rank has written a trace (rank-*.json) to {path}: name the folder given to timeline()"
            )
        files += traces
    return Timeline(record for file in files for record in load(file).ranks)
