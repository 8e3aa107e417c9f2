"""Units as optimizers see them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_wrap._runtime import Unit


def sharded_params(units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the sharded parameters of units, each once."""
    layouts = (layout for unit in units for layout in unit.layouts)
    return [*dict.fromkeys(param for layout in layouts for param in layout.sharded_params)]
