"""The picture of a plan: memory by kind through the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_wrap._core import format_bytes
from fsdp_wrap.tools.drawing import drawn
from fsdp_wrap.tools.planning import figures
from fsdp_wrap.tools.planning.figures import Moment

_COLORS = {
    figures.SHARDS: "#5d8fb8",
    figures.OPTIMIZER_STATE: "#9aa5ad",
    figures.OTHERS: "#cfd6da",
    figures.GATHERED: "#58a65c",
    figures.ACTIVATIONS: "#f0a30a",
    figures.GRADIENTS: "#b3a2d9",
    figures.REDUCE_BUFFERS: "#2f7d5b",
    figures.OPTIMIZER_TEMPORARIES: "#a9743b",
    figures.COMMUNICATOR: "#c0392b",
}
"""By kind, in the order of the stack: from the one that changes least."""


def draw(
    path: str | Path, title: str, moments: Sequence[Moment], peak: Moment, seconds: float | None
) -> None:
    """Draws a stack of the kinds of memory over the predicted time, or over the places where none is known.

    Raises:
        ImportError: If matplotlib is missing.
    """
    with drawn(path, (12, 5)) as figure:
        axes = figure.subplots()
        kinds = [kind for kind in _COLORS if any(kind in moment.bytes_by_kind for moment in moments)]
        steps = [*moments, *moments[-1:]]  # the last until the end
        held = [[moment.bytes_by_kind.get(kind, 0) / 1e9 for moment in steps] for kind in kinds]
        at = [float(index) for index in range(len(steps))]
        if seconds is not None:
            at = [1e3 * (moment.begin or 0.0) for moment in moments] + [1e3 * seconds]
        axes.stackplot(at, held, labels=kinds, colors=[_COLORS[kind] for kind in kinds], step="post")
        axes.axhline(peak.nbytes / 1e9, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(
            f"peak {format_bytes(peak.nbytes)} in {peak.place}",
            (at[0] if at else 0, peak.nbytes / 1e9),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=9,
        )
        axes.set(ylabel="GB", xlabel="places in the step" if seconds is None else "predicted milliseconds")
        axes.set_ylim(0, peak.nbytes / 1e9 * 1.1)
        axes.set_title(title, fontsize=11)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8)
