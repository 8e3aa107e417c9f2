"""The picture of README and of the site's first page: time and memory beside torch's own.

    python -m benchmarks.overview

draws it anew from the figures that were kept; `python -m benchmarks` does so as well.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drawing import picture

TITLE = "Step time and peak memory, relative to torch's own"
NAME = "overview.svg"
NARROW = "overview-narrow.svg"
"""The same with one panel below the other, for phones."""
SHARED_MEMORY = "shared memory"
MODELS = ("gpt", "small", "mlp", "lora")
DOCS = Path(__file__).resolve().parents[1] / "docs"


class Bar(NamedTuple):
    """One of our implementations, and the forms of torch's that it is compared with."""

    label: str
    row: str
    beside: str
    forms: tuple[str, ...]
    color: str


BARS = (
    Bar("wrapper, gloo", "fsdp_wrap", "fsdp1", ("fsdp1", "fsdp1_flat"), "#b3d3f2"),
    Bar(f"wrapper, {SHARED_MEMORY}", "fsdp_wrap_shared", "fsdp1", ("fsdp1", "fsdp1_flat"), "#66a5e3"),
    Bar("fully_shard, gloo", "fully_shard", "fsdp2", ("fsdp2",), "#f7cfa8"),
    Bar(f"fully_shard, {SHARED_MEMORY}", "fully_shard_shared", "fsdp2", ("fsdp2",), "#ea9a56"),
)


def ratios_of_times(answers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the time of a step relative to torch's, by model and bar; the fastest form counts."""
    tables = answers.get("step", {}).get("figures", {})
    return {
        model: {bar.label: tables[model][bar.row][f"/ {bar.beside}"] for bar in BARS}
        for model in MODELS
        if model in tables and all(bar.row in tables[model] for bar in BARS)
    }


def ratios_of_memory(answers: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the host's peak memory relative to torch's, by model and bar; the least counts."""
    tables = answers.get("memory", {}).get("figures", {})
    ratios = {}
    for model in MODELS:
        peaks = {row: cells["host peak MB"] for row, cells in tables.get(f"{model}, resident", {}).items()}
        if all(name in peaks for bar in BARS for name in (bar.row, *bar.forms)):
            ratios[model] = {
                bar.label: peaks[bar.row] / min(peaks[form] for form in bar.forms) for bar in BARS
            }
    return ratios


def draw_overview(folder: Path, answers: Mapping[str, Any]) -> bool:
    """Draws both as groups of bars, side by side and one below the other; returns whether it could."""
    panels = {
        "Time of a step": ratios_of_times(answers),
        "Peak memory of a host": ratios_of_memory(answers),
    }
    if importlib.util.find_spec("matplotlib") is None or not all(panels.values()):
        return False
    widths = [len(groups) for groups in panels.values()]
    with picture(folder / NAME, (7.2, 2.9), 9) as figure:
        places = figure.subplots(1, len(panels), sharey=True, width_ratios=widths)
        _draw_panels(figure, panels, places, columns=2)
    with picture(folder / NARROW, (3.7, 5.8), 9) as figure:
        _draw_panels(figure, panels, figure.subplots(len(panels), 1), columns=1)
    return True


def _draw_panels(figure: Any, panels: Mapping[str, Mapping[str, Any]], places: Any, columns: int) -> None:
    for axes, (title, groups) in zip(places, panels.items()):
        _draw_groups(axes, title, groups)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _draw_groups(axes: Any, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    width = 1 / (len(BARS) + 0.5)
    for index, bar in enumerate(BARS):
        heights = [values[bar.label] for values in groups.values()]
        places = [group + (index + 0.75) * width for group in range(len(groups))]
        drawn = axes.bar(places, heights, width=width * 0.92, label=bar.label, color=bar.color)
        axes.bar_label(drawn, fmt="%.2f", label_type="center", rotation=90, color="#1f2328")
    axes.axhline(1, color="#8b95a1", linewidth=1, linestyle="--", zorder=0)
    axes.set_xticks([group + 0.5 for group in range(len(groups))], list(groups))
    axes.set_title(title, fontsize=10)
    axes.set_ylim(0, 1.15)
    axes.set_yticks([0, 0.5, 1], ["0", "0.5", "torch's 1"])
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draws the picture from the figures that `python -m benchmarks` kept."""
    folder = DOCS / "performance"
    if not draw_overview(folder, json.loads((folder / "figures.json").read_text())):
        raise SystemExit("nothing drawn: it needs matplotlib, and figures of a step's time and of memory")


if __name__ == "__main__":
    main()
