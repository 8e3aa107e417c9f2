"""The registry of the modules and parameters that units own; refuses a second unit of a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core import AlreadyShardedError, UnitContents, mark_owned
from fsdp_wrap._params import Layout
from fsdp_wrap._runtime.unit import Unit


class Registry:
    """The modules and parameters that units own, all held weakly.

    Attributes:
        taken: The modules that units have taken, as their own or as part of them, in that order.
    """

    def __init__(self) -> None:
        self.taken: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        # In the order of `note`: lenders unshard in it, so it must be the same on all ranks.
        self._users: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Unit, None]]
        self._users = weakref.WeakKeyDictionary()
        self._owners = WeakIdKeyDictionary()  # original parameter -> its unit, segment and index there

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Records modules as taken by a unit."""
        self.taken.update(dict.fromkeys(modules))

    def taken_in(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules at and below `module` that a unit has taken."""
        return [each for each in module.modules() if each in self.taken]

    def refuse_taken(self, module: nn.Module) -> None:
        """Refuses a module that a unit has taken already, as its own or as part of it."""
        if module in self.taken:
            raise AlreadyShardedError(
                f"this {type(module).__name__} is already wrapped, or part of a wrapped module; wrap parts "
                "before the whole, each once"
            )

    def note(self, unit: Unit, originals: Iterable[Sequence[nn.Parameter]]) -> None:
        """Records the parameters of a unit, given by segment, and the modules that show them."""
        for number, (params, layout) in enumerate(zip(originals, unit.layouts)):
            for index, param in enumerate(params):
                if param is not layout.sources[index] or not isinstance(param, DTensor):
                    # Not a `DTensor` that is the source itself: conversions swap it, which
                    # weak references would forbid.
                    mark_owned(param)
                    self._owners[param] = weakref.ref(unit), number, index
            for module, _ in chain.from_iterable(layout.places):
                self._users.setdefault(module, weakref.WeakKeyDictionary())[unit] = None

    def units(self) -> set[Unit]:
        """Returns all units with parameters."""
        return {unit for units in self._users.values() for unit in units if unit.handle is not None}

    def owner(self, fqn: str, param: nn.Parameter) -> tuple[Unit, Layout, int]:
        """Returns the unit that owns an original parameter, its layout, and its index there."""
        if param not in self._owners:
            raise ValueError(
                f"parameter '{fqn}' is the sharded parameter of another unit: tie parameters before "
                "sharding them"
            )
        reference, number, index = self._owners[param]
        unit: Unit | None = reference()
        if unit is None or unit.handle is None:
            raise ValueError(
                f"parameter '{fqn}' was sharded in a wrapped module that no longer exists, and its values "
                "are gone with it: build the module anew, or keep the wrapped one"
            )
        return unit, unit.layouts[number], index

    def borrow(self, contents: UnitContents) -> list[Unit]:
        """Makes the owners of tied parameters show them in a new unit's modules too; returns the owners."""
        users = (self._users.get(module, ()) for _, module in contents.modules)
        # A unit whose module is gone has no handle, and lends nothing.
        lenders = {unit: None for unit in chain.from_iterable(users) if unit.handle is not None}
        for fqn, place, param in contents.borrowed:
            layouts = (layout for unit in self._users.get(place[0], ()) for layout in unit.layouts)
            shown = (places for layout in layouts for places in layout.places)
            if not any(place in places for places in shown):  # units may share it
                unit, layout, index = self.owner(fqn, param)
                layout.add_place(index, place)
                lenders[unit] = None
        return list(lenders)


REGISTRY = Registry()
"""The registry of this process."""
