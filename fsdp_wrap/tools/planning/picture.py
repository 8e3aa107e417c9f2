"""The picture of a plan: memory by kind through the step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_wrap.tools.drawing import drawn

if TYPE_CHECKING:
    from fsdp_wrap.tools.planning.plan import Plan

_COLORS = {
    "shards": "#5d8fb8",
    "optimizer state": "#9aa5ad",
    "others": "#cfd6da",
    "gathered": "#58a65c",
    "activations": "#f0a30a",
    "gradients": "#b3a2d9",
    "reduce buffers": "#2f7d5b",
    "optimizer temporaries": "#a9743b",
    "communicator": "#c0392b",
}
"""By kind, from the one that changes least on."""


def draw(plan: Plan, path: str | Path) -> None:
    """Draws what is held at each place of the step, one on top of the other.

    Raises:
        ImportError: If matplotlib is missing.
    """
    with drawn(path, (12, 5)) as figure:
        _draw_on(figure, plan)


def _draw_on(figure: Any, plan: Plan) -> None:
    axes = figure.subplots()
    kinds = [kind for kind in _COLORS if any(kind in moment.bytes_by_kind for moment in plan.moments)]
    moments, end = [*plan.moments, *plan.moments[-1:]], plan.predicted_seconds  # the last until the end
    held = [[moment.bytes_by_kind.get(kind, 0) / 1e9 for moment in moments] for kind in kinds]
    at = [float(index) for index in range(len(moments))]
    if end is not None:
        at = [1e3 * (moment.begin or 0.0) for moment in plan.moments] + [1e3 * end]
    axes.stackplot(at, held, labels=kinds, colors=[_COLORS[kind] for kind in kinds], step="post")
    axes.axhline(plan.peak_bytes / 1e9, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        f"peak {plan.peak_bytes / 1e9:.3g} GB in {plan.peak_at}",
        (at[0] if at else 0, plan.peak_bytes / 1e9),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set(ylabel="GB", xlabel="places in the step" if end is None else "predicted milliseconds")
    axes.set_ylim(0, plan.peak_bytes / 1e9 * 1.1)
    axes.set_title(f"Memory of rank {plan.rank} of {plan.ranks} on {plan.device}", fontsize=11)
    figure.legend(
        *(each[::-1] for each in axes.get_legend_handles_labels()), loc="outside right upper", fontsize=8
    )
