"""Units as optimizers see them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_wrap._runtime import Unit


def sharded_params(units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the sharded parameters of units, each once."""
    params = (sharded for unit in units for sharded in unit.params)
    return [*dict.fromkeys(param for sharded in params for param in sharded.sharded_params)]
