"""The log of units: which collectives a unit issues in which groups, and that it is entered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cached_property, partial

from fsdp_wrap._comm.positions.agreement import Agreement
from fsdp_wrap._comm.positions.group import Collective, GroupPositions, Issued, Places, compare_waited
from fsdp_wrap._comm.positions.host_log import write_entry
from fsdp_wrap._comm.positions.notes import CHANGED, Note, StepCounts

Agree = Callable[[Agreement, str], None]


class Tree(StepCounts):
    """A tree of units: its identity, as units of several trees may have equal names, and its steps.

    Attributes:
        changes: The changes of its values that all ranks must have made before the next collective, as the
            end of each note; "" before the first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[GroupPositions, int] = {}
        self._collectives: weakref.WeakSet[UnitCollective] = weakref.WeakSet()
        self.changes = ""

    def add(self, collective: UnitCollective) -> None:
        """Adds a collective of its units, whose notes follow `changes`."""
        self._collectives.add(collective)

    def change(self, changes: str) -> None:
        """Sets `changes`: from now on this rank's notes differ from those of a rank without them."""
        self.changes = f"{CHANGED}{changes}" if changes else ""
        for collective in self._collectives:
            collective.rewrite()

    @property
    def issued(self) -> int:
        """Number of collectives that this rank has issued in the tree's groups."""
        return sum([group.issued for group in self._numbers])

    def number_in(self, group: GroupPositions) -> int:
        """Returns the tree's number in the group, by the order of first collectives.

        The order of wrapping need not be the same on all ranks; the order of collectives must be.
        """
        if group not in self._numbers:
            group.trees += 1
            self._numbers[group] = group.trees
        return self._numbers[group]


class UnitCollective(Collective):
    """A collective of units; before the first, `agree` compares the unit across each group's ranks."""

    def __init__(
        self,
        texts: tuple[str, ...],
        tree: Tree,
        groups: tuple[GroupPositions, ...],
        issued: list[Issued],
        agree: Agree | None = None,
    ) -> None:
        super().__init__((), issued, tree)
        self._tree, self._groups = tree, groups
        self._texts, self._agree = texts, agree
        self._is_known = not groups
        tree.add(self)

    @property
    def is_known(self) -> bool:
        """Whether the ranks have compared the unit."""
        return self._is_known

    def rewrite(self) -> None:
        """Writes the notes anew at the next collective."""
        self._places = ()

    def with_others(self, others: Iterable[UnitCollective]) -> UnitCollective:
        """Returns the batched collective of known units of one tree in the same groups."""
        # "gathers a" and "gathers b" make "gathers a and b"
        texts = (text.partition(" ")[2] for other in others for text in other._texts)
        return UnitCollective((*self._texts, *texts), self._tree, self._groups, self._issued)

    def _find_places(self) -> Places:
        places = []
        for group in self._groups:
            number = self._tree.number_in(group)
            root = "" if number == 1 else f" of root number {number}"
            text = " and ".join(f"{what}{root}" for what in self._texts)
            if self._agree is not None and not self._is_known:
                self._agree(group.agreement, text.partition(" ")[2])
            places.append((group, Note(text + self._tree.changes)))
        self._places, self._is_known = places, True
        return places


class UnitPositions:
    """Logs the collectives of one unit, and that it is entered.

    Args:
        name: The unit's name in messages.
        tree: The unit's tree.
        gathering: Groups in which it gathers parameters; the same on every rank.
        reducing: Groups in which it reduces gradients.
        keeping: Groups that share its full parameters between forward and backward.
        waits: Whether waiting for a collective means that it has completed.
        agree: Called with each group's agreement and the unit's name there, before its first collective.

    Attributes:
        enter: Logs, given the iteration and the phase's index, that this rank enters the unit.
        gather: The gather of parameters.
        reduction: The reduction of gradients.
        gathers: Gathers to compare once they were waited for.
        gathered: Compares `gathers` with the peers' collectives.
        reductions: Reductions to compare once they were waited for.
        reduced: Compares `reductions` with the peers' collectives.
    """

    def __init__(
        self,
        name: str,
        tree: Tree,
        gathering: Iterable[GroupPositions],
        reducing: Iterable[GroupPositions],
        keeping: Iterable[GroupPositions],
        waits: bool,
        agree: Agree,
    ) -> None:
        self._name, self._tree, self._agree = name, tree, agree
        self._gathering, self._keeping = tuple(dict.fromkeys(gathering)), tuple(dict.fromkeys(keeping))
        groups = tuple(dict.fromkeys(reducing))
        self.gathers = list[Issued]()
        self.reductions = list[Issued]()
        self.gather = self._collective(f"gathers {name}", self._gathering, self.gathers)
        self.reduction = self._collective(f"reduces {name}", groups, self.reductions)
        self.gathered = partial(compare_waited, self.gathers, waits)
        self.reduced = partial(compare_waited, self.reductions, waits)
        world = next((group.world for group in groups), None)
        self.enter: Callable[[int, int], object] = lambda iteration, phase: None
        if world is not None:
            self.enter = partial(write_entry, world.log.memory, world.log.entries, 1, 0, Note(name).text)

    @cached_property
    def gather_kept(self) -> UnitCollective:
        """The gather from the ranks that share the unit's full parameters between forward and backward."""
        return self._collective(f"gathers {self._name} from neighbours", self._keeping, self.gathers)

    @cached_property
    def reduction_in_copy(self) -> UnitCollective:
        """The reduction of gradients within one copy."""
        return self._collective(f"reduces {self._name} in a copy", self._gathering, self.reductions)

    def _collective(
        self, text: str, groups: tuple[GroupPositions, ...], issued: list[Issued]
    ) -> UnitCollective:
        return UnitCollective((text,), self._tree, groups, issued, self._agree)
