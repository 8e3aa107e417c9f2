"""Which modules and parameters units have taken: what ties modules to units, and refuses a second unit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core import AlreadyShardedError, Place, UnitContents, mark_owned
from fsdp_wrap._params import Layout
from fsdp_wrap._runtime.unit import Unit


class Registry:
    """Everything in it is held weakly: nothing outlives its users because it is known here."""

    def __init__(self) -> None:
        self._taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Units in the order in which they were noted, which is the same on all ranks: they unshard in it.
        self._users: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Unit, None]]
        self._users = weakref.WeakKeyDictionary()
        self._owners = WeakIdKeyDictionary()  # for an original parameter: its unit, segment and place there

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Notes that a unit has taken modules."""
        self._taken.update(modules)

    def taken_in(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules at and below `module` that a unit has taken."""
        return [each for each in module.modules() if each in self._taken]

    def refuse_taken(self, module: nn.Module) -> None:
        """Refuses a module that a unit has taken already, as its own or as part of it."""
        if module in self._taken:
            raise AlreadyShardedError(
                f"this {type(module).__name__} is already wrapped, or part of a wrapped module; wrap parts "
                "before the whole, each once"
            )

    def note(self, unit: Unit, originals: Iterable[Sequence[nn.Parameter]]) -> None:
        """Notes whose parameters a unit owns, and where they are shown.

        Args:
            unit: The unit.
            originals: For each segment, the parameters for which its leaves stand.
        """
        segments = unit.handle.segments if unit.handle is not None else ()
        for number, (params, segment) in enumerate(zip(originals, segments)):
            for index, param in enumerate(params):
                if param is not segment.layout.sources[index] or not isinstance(param, DTensor):
                    # The latter conversions exchange: no weak references.
                    mark_owned(param)
                    self._owners[param] = weakref.ref(unit), number, index
            for module, _ in chain.from_iterable(segment.layout.places):
                self._users.setdefault(module, weakref.WeakKeyDictionary())[unit] = None

    def owner(self, fqn: str, param: nn.Parameter) -> tuple[Unit, Layout, int]:
        """Returns the unit that has taken a parameter, the layout in which it is, and its number there.

        Raises:
            ValueError: If it is a sharded parameter itself, or its unit is gone.
        """
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
        return unit, unit.handle.segments[number].layout, index

    def borrow(self, contents: UnitContents) -> list[Unit]:
        """Lets the owners of tied parameters show them in a unit's modules as well; returns the owners."""
        users = (self._users.get(module, ()) for _, module in contents.modules)
        # Of a unit whose module has gone nothing is left to use.
        lenders = {unit: None for unit in chain.from_iterable(users) if unit.handle is not None}
        for fqn, place, param in contents.borrowed:
            if not self._shows(place):
                unit, layout, index = self.owner(fqn, param)
                layout.add_place(index, place)
                lenders[unit] = None
        return list(lenders)

    def _shows(self, place: Place) -> bool:
        """Whether a unit shows a parameter in this place already, as in a module that two units share."""
        handles = [unit.handle for unit in self._users.get(place[0], ()) if unit.handle is not None]
        layouts = [layout for handle in handles for layout in handle.layouts]
        return any(place in places for layout in layouts for places in layout.places)


REGISTRY = Registry()
"""The one of this process."""
