"""The log of units: which collectives a unit issues in which groups, and that it is entered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
        texts: Sequence[str],
        tree: Tree,
        groups: Iterable[GroupPositions],
        issued: list[Issued],
        agree: Agree | None = None,
    ) -> None:
        super().__init__([], issued, tree)
        self._tree = tree
        self._texts, self._agree = texts, agree
        self._groups = tuple(dict.fromkeys(groups))
        self._is_known = not self._groups
        tree.add(self)

    @property
    def is_known(self) -> bool:
        """Whether the ranks have compared the unit."""
        return self._is_known

    def rewrite(self) -> None:
        """Writes the notes anew at the next collective."""
        self._places = []

    def with_others(self, others: Iterable[UnitCollective]) -> UnitCollective:
        """Returns the batched collective of known units of one tree in the same groups."""
        # "gathers a" and "gathers b" make "gathers a and b"
        texts = [*self._texts, *(text.partition(" ")[2] for other in others for text in other._texts)]
        return UnitCollective(texts, self._tree, self._groups, self._issued)

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
        gather_kept: The gather from the ranks in `keeping`.
        reduction: The reduction of gradients.
        reduction_in_copy: The reduction of gradients within one copy.
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
        self.gathers = gathers = list[Issued]()
        self.reductions = reductions = list[Issued]()
        in_copy = [f"reduces {name} in a copy"]
        self.gather = UnitCollective([f"gathers {name}"], tree, gathering, gathers, agree)
        self.gather_kept = UnitCollective([f"gathers {name} from neighbours"], tree, keeping, gathers, agree)
        self.reduction = UnitCollective([f"reduces {name}"], tree, reducing, reductions, agree)
        self.reduction_in_copy = UnitCollective(in_copy, tree, gathering, reductions, agree)
        self.gathered = partial(compare_waited, gathers, waits)
        self.reduced = partial(compare_waited, reductions, waits)
        world = next((group.world for group in reducing), None)
        self.enter: Callable[[int, int], object] = lambda iteration, phase: None
        if world is not None:
            self.enter = partial(write_entry, world.log.memory, world.log.entries, 1, 0, Note(name).text)
