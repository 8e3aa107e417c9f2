"""Pictures for light and dark pages: they have no background, and their ink follows the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STYLE = "<style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#e2e8f0}}</style>"
COLORS = {
    "fsdp_wrap": "#4a90d9",
    "wrapper": "#4a90d9",
    "fully_shard": "#e08a3c",
    "ddp": "#8b95a1",
    "fsdp1": "#8b95a1",
    "fsdp2": "#8b95a1",
    "gloo": "#8b95a1",
}
"""The wrapper, `fully_shard`, and torch's own, by the beginning of a name."""
OTHERS = "#3fa37a"


def color_of(name: str) -> str:
    """Returns the colour of an implementation; what is none of those with a colour has one in common."""
    return next((color for known, color in COLORS.items() if name.startswith(known)), OTHERS)


@contextmanager
def picture(path: Path, size: tuple[float, float], font: float) -> Iterator[Any]:
    """Yields a figure (`size` in inches), and saves it at the end as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": font}):
        figure = pyplot.figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)
    path.write_text(in_the_pages_ink(path.read_text("utf-8")), "utf-8")


def in_the_pages_ink(svg: str) -> str:
    """Lets what matplotlib draws in black follow the page, which may be dark."""
    head, opening, rest = svg.partition("<svg ")
    attributes, end, content = rest.partition(">")
    return f'{head}{opening}fill="currentColor" {attributes}{end}{STYLE}' + content.replace(
        "#000000", "currentColor"
    )
