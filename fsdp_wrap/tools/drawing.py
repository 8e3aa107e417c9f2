"""Pictures by matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_wrap._core import own_output


@contextmanager
def drawn(path: str | Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yields a figure (`size` in inches), and saves it at the end: equal pictures are equal bytes.

    Raises:
        ImportError: If matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with matplotlib.rc_context({"svg.hashsalt": "fsdp_wrap", "svg.fonttype": "none"}):
        figure.savefig(
            own_output(Path(path)), metadata={"Date": None} if str(path).endswith(".svg") else None
        )
