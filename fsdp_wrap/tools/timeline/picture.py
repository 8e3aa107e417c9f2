"""The picture of a timeline: one pass with each rank's computation, waits and transfers, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_wrap.tools.drawing import drawn
from fsdp_wrap.tools.timeline.analysis import Analysis
from fsdp_wrap.tools.timeline.records import GATHER, HELP, RankRecord

MOST_RANKS = 8  # in the picture
COLORS = {
    "recompute": "#b3a2d9",
    "forward": "#6fa8dc",
    "backward": "#6fa8dc",
    "optimizer": "#98a2ad",
    HELP: "#d98fb0",
    "wait for a late rank": "#d64b3c",
    "wait for a transfer": "#f0a30a",
    "wait for copies": "#a9743b",
    "gather": "#4fa66b",
    "reduce": "#4fa66b",
    "to device": "#c4a766",
    "to host": "#c4a766",
    "activations to device": "#c4a766",
    "activations to host": "#c4a766",
}
"""Gathers and copies to the device lie above reductions and copies to the host, in one colour each."""
_COMPUTE, _TRANSFERS = 0.0, -1.0
_HEIGHT, _ROW = 0.8, 2.4
"""The height of a bar, and the distance of ranks."""


class _Rectangle(NamedTuple):
    """A bar; times in nanoseconds, in the clock of rank 0."""

    what: str
    begin: int
    end: int


def draw(ranks: Sequence[RankRecord], path: str | Path) -> None:
    """Draws the pass whose time is closest to the average.

    Raises:
        ImportError: If matplotlib is missing.
    """
    shown, analysis = ranks[:MOST_RANKS], Analysis(ranks)
    begin, end = _window(shown[0], analysis)
    with drawn(path, (9, 1.6 + 1.0 * len(shown) + 1.4)) as figure:
        tracks, held = figure.subplots(2, 1, sharex=True, height_ratios=[len(shown), 1.0])
        used = set()
        for row, record in enumerate(shown):
            for bar in _bars(record, analysis):
                if bar.end > begin and bar.begin < end:
                    used.add(bar.what)
                    _draw_bar(tracks, bar, row, begin, end)
        _label(tracks, shown, ranks, used)
        _draw_levels(held, shown[0], begin, end)


def _window(record: RankRecord, analysis: Analysis) -> tuple[int, int]:
    """Returns the times of the pass that is shown, in the clock of rank 0."""
    ends = [*record.passes[1:], record.end]
    spans = [*zip(record.passes, ends)] or [(record.begin, record.end)]
    begin, end = min(spans, key=lambda span: abs(span[1] - span[0] - analysis.pass_ns))
    return begin + record.offset, end + record.offset


def _bars(record: RankRecord, analysis: Analysis) -> Iterator[_Rectangle]:
    """Yields a rank's bars, inner ones later, and so above outer ones."""
    offset = record.offset
    for slice_ in (*record.compute, *record.host_side, *record.copies):
        if slice_.what in COLORS:
            yield _Rectangle(slice_.what, slice_.begin + offset, slice_.end + offset)
    for wait in analysis.waits:
        if wait.rank == record.rank:
            middle = wait.begin + wait.late
            yield _Rectangle("wait for a late rank", wait.begin, middle)
            yield _Rectangle("wait for a transfer", middle, middle + wait.transfer)
    for transfer in record.transfers:
        yield _Rectangle(transfer.kind, transfer.begin + offset, transfer.end + offset)


def _draw_bar(axes: Any, bar: _Rectangle, row: int, begin: int, end: int) -> None:
    first, last = max(bar.begin, begin), min(bar.end, end)
    travels = bar.what.endswith(("gather", "reduce", "to device", "to host"))
    level, height = (_TRANSFERS, _HEIGHT / 2) if travels else (_COMPUTE, _HEIGHT)
    if bar.what.endswith(("reduce", "to host")):
        level -= height
    axes.broken_barh(
        [((first - begin) / 1e6, (last - first) / 1e6)],
        (-_ROW * row + level - height / 2, height),
        color=COLORS[bar.what],
        edgecolor="white",
        linewidth=0.3,
    )


def _label(axes: Any, shown: Sequence[RankRecord], ranks: Sequence[RankRecord], used: set[str]) -> None:
    from matplotlib.patches import Patch

    ticks = {}
    for row, record in enumerate(shown):
        ticks[-_ROW * row + _COMPUTE] = f"rank {record.rank}"
        ticks[-_ROW * row + _TRANSFERS - _HEIGHT / 4] = "on its way"
    axes.set_yticks([*ticks], [*ticks.values()])
    groups = groupby((what for what in COLORS if what in used), COLORS.__getitem__)
    keys = [Patch(color=color, label=", ".join(names)) for color, names in groups]
    axes.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=5, frameon=False, fontsize=8)
    if len(ranks) > len(shown):
        axes.set_xlabel(f"the first {len(shown)} of {len(ranks)} ranks", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_levels(axes: Any, record: RankRecord, begin: int, end: int) -> None:
    """Draws the memory of a rank."""
    points = [level for level in record.levels if begin <= level.at + record.offset <= end]
    before = [level for level in record.levels if level.at + record.offset < begin][-1:]
    times = [max(0.0, (level.at + record.offset - begin) / 1e6) for level in (*before, *points)]
    values: Mapping[str, list[float]] = {
        "full parameters": [level.unsharded / 1e6 for level in (*before, *points)],
        "gradients on their way": [level.gradients / 1e6 for level in (*before, *points)],
    }
    for (label, heights), style in zip(values.items(), ("-", ":")):
        axes.step(times, heights, where="post", label=label, color=COLORS[GATHER], linestyle=style)
    axes.set_ylabel(f"MB, rank {record.rank}", fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
