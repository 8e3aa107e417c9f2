"""`fsdp-wrap values diff` and `fsdp-wrap verify`: compare two records of values, or make and compare them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure, Run, SeamTotals
from fsdp_wrap._values.finding import quoted, ranked
from fsdp_wrap._values.verdict import Verdict, judge
from fsdp_wrap._values.verifying import verify
from fsdp_wrap._values.verifying.observe import Setup

Drawn = Callable[[Path, tuple[float, float]], AbstractContextManager[Any]]
"""Yields a figure of a size, and saves it to a path."""

_LEAST = -12  # the power of ten at which a bar begins
_BAR = 24
_DRAWN = {
    "outputs": (files.OUTPUT,),
    "gradients": (files.GRADIENT, files.REDUCED),
    "parameters": (files.SHARD, files.PARAMETER),
    "updates": (files.UPDATE,),
}


def add_commands(commands: Any, drawn: Drawn, load: Callable[[str], Setup]) -> None:
    """Adds `values` and `verify` to the command line; `drawn` makes pictures, `load` finds functions."""
    values = commands.add_parser(
        "values",
        help="compare recordings of fsdp_wrap.record_values()",
        description="Compare two recordings of fsdp_wrap.record_values().",
    )
    inner = values.add_subparsers(required=True, metavar="diff")
    diff = inner.add_parser("diff", help="name the first seam at which two records depart")
    diff.add_argument("first", type=Path, metavar="A", help="the folder of a record")
    diff.add_argument("second", type=Path, metavar="B", help="the folder of another one")
    diff.add_argument("--svg", type=Path, default=None, help="draw departure against depth to this file")
    diff.set_defaults(run=partial(_run_diff, drawn))
    told = "run a few steps sharded and plain, and tell what differs; the status is 1 if anything is wrong"
    command = commands.add_parser("verify", help="is sharded training right?", description=told)
    command.add_argument(
        "setup", metavar="FILE.py:setup", help="the function, as fsdp_wrap.verify() takes it"
    )
    command.add_argument("--ranks", type=int, default=2, metavar="N", help="default: 2")
    command.add_argument("--steps", type=int, default=3, metavar="N", help="default: 3")
    against = "what to compare with; default: plain"
    command.add_argument("--against", choices=("plain", "one rank"), default="plain", help=against)
    command.set_defaults(run=partial(_run_verify, load))


def _run_verify(load: Callable[[str], Setup], options: argparse.Namespace) -> int:
    report = verify(load(options.setup), options.ranks, options.steps, against=options.against)
    print(report)
    return int(not report.ok)


def _run_diff(drawn: Drawn, options: argparse.Namespace) -> int:
    runs = [Run(files.read(path)) for path in (options.first, options.second)]
    verdict = judge(runs[0], runs[1])
    print("\n".join(report(verdict, runs)))
    if options.svg is not None:
        _draw(verdict, options.svg, drawn)
        print(f"wrote {options.svg}")
    return 0


def report(verdict: Verdict, runs: Sequence[Run]) -> list[str]:
    """Returns the lines of a report."""
    lines = [
        f"{name}: {run.ranks} rank{'s' * (run.ranks > 1)}, torch {run.records[0].header.torch}"
        for name, run in zip("AB", runs)
    ]
    first = verdict.first
    if first is not None:
        whose = ranked(first.ranks) if runs[0].ranks > 1 else ""
        lines.append(
            f"first departure: step {first.step}, {first.seam} of unit {quoted(first.unit)}"
            f"{whose and f' on {whose}'}, by {first.size:.1e} of its size"
        )
        lines += [_numbers(name, totals) for name, totals in zip("AB", first.before)]
    lines.append(f"{verdict.kind}: {verdict.told}.")
    if first is not None:
        lines += ["", f"departure against depth in step {first.step} (each # half a power of ten):"]
        lines += _bars(verdict.steps)
    return lines


def _numbers(name: str, totals: SeamTotals) -> str:
    sums, scale = totals.sums, totals.scale
    return (
        f"  {name}: norm {sums.norm * scale:.6g}, largest {sums.largest * scale:.6g}, mean "
        f"{sums.total * scale / max(sums.numel, 1):.6g}, {sums.numel} elements of {sums.dtype}, "
        f"{sums.zeros} zeros, {sums.nan} NaN, {sums.inf} infinite, checksum {sums.checksum:016x}"
    )


def _units(departures: Sequence[Departure]) -> list[str]:
    """Returns the units in the order of their forwards."""
    begun = [departure.unit for departure in departures if departure.seam == files.OUTPUT]
    return [*dict.fromkeys([*begun, *(departure.unit for departure in departures)])]


def _sizes(departures: Sequence[Departure]) -> dict[str, dict[str, float]]:
    """Returns the largest departure by chart and by unit."""
    sizes: dict[str, dict[str, float]] = {what: {} for what in _DRAWN}
    for departure in departures:
        for what, seams in _DRAWN.items():
            if departure.seam in seams:
                sizes[what][departure.unit] = max(departure.size, sizes[what].get(departure.unit, 0.0))
    return {what: by_unit for what, by_unit in sizes.items() if by_unit}


def _height(size: float) -> float:
    if not size:
        return 0.0
    return min(max(math.log10(size) - _LEAST, 0.5), -_LEAST) if math.isfinite(size) else float(-_LEAST)


def _bars(departures: Sequence[Departure]) -> list[str]:
    sizes, units = _sizes(departures), _units(departures)
    names = [quoted(unit) for unit in units]
    width = max(map(len, names))
    lines = []
    for what, by_unit in sizes.items():
        lines.append(f"  {what}")
        for unit, name in zip(units, names):
            if unit in by_unit:
                bar = "#" * round(_height(by_unit[unit]) * _BAR / -_LEAST)
                lines.append(f"    {name:{width}}  {by_unit[unit]:7.1e} |{bar:{_BAR}}|")
    return lines


def _draw(verdict: Verdict, path: Path, drawn: Drawn) -> None:
    sizes, units = _sizes(verdict.steps), _units(verdict.steps)
    with drawn(path, (7, 3.2)) as figure:
        axes = figure.subplots()
        for (what, by_unit), style in zip(sizes.items(), ("o-", "s--", "^:", "x-.")):
            places = [place for place, unit in enumerate(units) if unit in by_unit]
            heights = [max(min(by_unit[units[place]], 1e3), 10.0**_LEAST) for place in places]
            axes.plot(places, heights, style, label=what, markersize=4, linewidth=1)
        axes.set_yscale("log")
        axes.set_ylabel("relative departure")
        axes.set_xticks(
            range(len(units)), [quoted(unit) for unit in units], rotation=45, ha="right", fontsize=8
        )
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
