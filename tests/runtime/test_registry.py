"""What is known of units and modules, in an order that all ranks share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from fsdp_wrap._runtime.registry import Registry


class Standing:
    """Stands for a unit that shows a parameter in a module."""

    def __init__(self, module: nn.Module) -> None:
        segment = SimpleNamespace(layout=SimpleNamespace(places=[[(module, "weight")]], sources=[]))
        self.handle: Any = SimpleNamespace(segments=[segment])


def test_units_of_one_module_are_lenders_in_the_order_of_their_making():
    """An order by addresses would be another on each rank, and so would be that of their collectives."""
    module, registry = nn.Linear(2, 2), Registry()
    units: list[Any] = [Standing(module) for _ in range(50)]
    for unit in units:
        registry.note(unit, [[]])
    contents: Any = SimpleNamespace(modules=[("", module)], borrowed=[])
    assert registry.borrow(contents) == units
