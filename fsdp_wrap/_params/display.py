"""`UnitDisplay`: what the modules of a unit show of its parameters in training."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from fsdp_wrap._params.segment import Segment


class Showing(Enum):
    """What modules show.

    Attributes:
        SHARDED: The sharded parameters.
        LEAVES: The leaves, with which they compute.
        KEPT: The leaves by their attributes, for who computes with those between forward and backward; the
            sharded parameters by `parameters()`, since optimizers hold these.
    """

    SHARDED = "sharded"
    LEAVES = "leaves"
    KEPT = "kept"


class UnitDisplay:
    """Lets the modules of one unit show its sharded parameters or its leaves.

    Args:
        segments: Those of the unit's handle, which show their leaves.

    Attributes:
        state: What they show, unless something else is shown to the user.
        changed: Names of parameters that were changed while the leaves were shown to the user; whoever tells
            so forgets them.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.state = Showing.LEAVES
        self.changed: list[str] = []
        self.show_sharded()

    @property
    def untouched(self) -> bool:
        """Whether nobody is known to have changed the leaves, or replaced what is shown."""
        if self.changed:
            return False
        shown = self._segments if self.state is Showing.SHARDED else ()
        return all(segment.layout.shown_sharded.is_untouched() for segment in shown)

    def show_leaves(self) -> None:
        """Lets the modules compute with the leaves."""
        if self.state is not Showing.LEAVES:
            if self.state is Showing.KEPT:
                self._uncover()
                self._note_replaced()  # since the leaves take their place
            self.state = Showing.LEAVES
            for segment in self._segments:
                segment.layout.show_leaves()

    def show_sharded(self) -> None:
        """Lets the modules show the sharded parameters."""
        if self.state is Showing.LEAVES:
            for segment in self._segments:
                segment.layout.show_sharded()
        elif self.state is Showing.KEPT:
            self._uncover()
        self.state = Showing.SHARDED

    def show_kept(self) -> None:
        """Lets the attributes of modules show the leaves, which a forward has kept."""
        self.show_sharded()
        self.state = Showing.KEPT
        for segment in self._segments:
            segment.cover()

    def _uncover(self) -> None:
        for segment in self._segments:
            fqns = segment.layout.fqns
            self.changed += [fqns[index] for index in segment.uncover()]

    def _note_replaced(self) -> None:
        for layout in (segment.layout for segment in self._segments):
            if not layout.shown_sharded.is_untouched():
                self.changed += [layout.fqns[index] for index, _ in layout.shown_sharded.replaced()]
