"""Reading what is pickled in data files: plain values, and what users admit, unless the folder is trusted."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["ValuesPlanner", "packed", "unpacked"]


def packed(value: Any) -> bytes:
    """Pickles a value; tensors that it refers to are copied now, and only the part that it shows."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, name: str, trusted: bool) -> Any:
    """Returns what was packed.

    Args:
        data: The bytes.
        name: What it is, for the error's text.
        trusted: Whether classes and functions of any kind may be called.

    Raises:
        RuntimeError: If it is more than plain values; nothing of it was run.
    """
    with torch.serialization.safe_globals(_of_numpy()):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
        except pickle.UnpicklingError as error:
            raise RuntimeError(f"{name} {_reason(data, error)}") from error


class ValuesPlanner(DefaultLoadPlanner):
    """Reads what is pickled as `unpacked` does."""

    def __init__(self, trusted: bool) -> None:
        super().__init__()
        self._trusted = trusted

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes one pickled entry."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = unpacked(value.getvalue(), f"'{name}'", self._trusted)


def _reason(data: bytes, error: Exception) -> str:
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    if not unsafe:
        return f"is no plain value: {error}"
    return (
        f"is no plain value: it asks for {', '.join(sorted(unsafe))}, and nothing of that was run. If you "
        "know who wrote this folder, admit the classes by torch.serialization.add_safe_globals([...]), or "
        "all by checkpoint.load(..., trusted=True)"
    )


def _of_numpy() -> list[Any]:
    """Returns what arrays and scalars of numpy, its random state too, are pickled by."""
    try:
        import numpy
    except ImportError:
        return []
    core: Any = numpy._core if hasattr(numpy, "_core") else numpy.core  # renamed in numpy 2
    makers = [
        (getattr(core.multiarray, maker), f"numpy.{place}.multiarray.{maker}")
        for maker in ("_reconstruct", "scalar")
        for place in ("_core", "core")
    ]
    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    return [numpy.ndarray, numpy.dtype, *kinds, *makers]
