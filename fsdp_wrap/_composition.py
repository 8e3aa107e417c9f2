"""What units and torch's other composable ways tell each other: which modules each has taken.

Torch keeps it in a registry on each module. `replicate()` there synchronises the gradients of what it finds
below its module, unless the registry tells that it is sharded: shards would be averaged with each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from torch import nn

from fsdp_wrap._torch_private import composable_registry
from fsdp_wrap._walks import walk

__all__ = ["announce_sharded", "find_replicated"]

_SHARDED, _REPLICATED = "fully_shard", "replicate"
"""The names of torch's functions, by which it looks."""


def announce_sharded(module: nn.Module) -> None:
    """Lets torch's composable ways know that a unit has taken a module: they leave alone what is below."""
    module.__dict__.setdefault(composable_registry, OrderedDict())[_SHARDED] = None


def find_replicated(modules: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Returns the modules that `replicate()` has taken, at and below those given, with all in them."""
    return frozenset(
        inner
        for module in modules
        for _, each in walk(module)
        if _REPLICATED in each.__dict__.get(composable_registry, ())
        for inner in each.modules()
    )
