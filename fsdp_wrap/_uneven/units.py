"""Units as optimizers see them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_wrap._runtime import Unit


def sharded_params(units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the sharded parameters of units, each once."""
    handles = [unit.handle for unit in units if unit.handle is not None]
    return [
        *dict.fromkeys(
            param for each in handles for layout in each.layouts for param in layout.sharded_params
        )
    ]
