"""Positions that ranks on different hosts write to the store once one of them is stuck.

Nobody reads or writes there while all goes well.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from itertools import starmap
from typing import Any

from fsdp_wrap._comm.positions.group import GroupPositions, list_ranks
from fsdp_wrap._comm.positions.notes import Noted, alike, behind


class Bulletin:
    """The bulletin of one group."""

    def __init__(self, positions: GroupPositions) -> None:
        self._positions = weakref.ref(positions)
        store: Any = positions.agreement.store
        try:  # another thread that waits at the store holds its connection
            self._store = store if store is None else store.clone()
        except (AttributeError, RuntimeError):  # it has but one
            self._store = store
        self._name = f"{positions.agreement.name}/bulletin"

    @property
    def asked(self) -> bool:
        """Whether a rank asks the others to pin up their positions."""
        return self._do(lambda store: store.check([f"{self._name}/asked"])) or False

    def ask(self) -> None:
        """Asks the others to pin up their positions; an idle rank does so within a minute."""
        self._do(lambda store: store.set(f"{self._name}/asked", "1"))

    def pin_up(self, state: str) -> None:
        """Writes this rank's state and latest collectives."""
        positions = self._positions()
        if positions is not None:
            written = json.dumps({"state": state, "history": positions.history()})
            self._do(lambda store: store.set(f"{self._name}/{positions.member}", written))

    def look(self, ranks: Iterable[int]) -> str:
        """Formats the positions of some ranks of the job, on lines of their own.

        Raises a RuntimeError if one has issued another collective in the place of one of this rank's.
        """
        positions = self._positions()
        if positions is None:
            return ""
        own = {noted.number: noted for noted in positions.history()}
        lines, silent = [], []
        for rank in ranks:
            report = self._read(rank)
            if report is None:
                silent.append(rank)
                continue
            history = [*starmap(Noted, report["history"])]
            for other in history:
                mine = own.get(other.number, other)
                if not alike((noted.digest, noted.tries) for noted in (mine, other)):
                    ours, theirs = behind([mine.digest, other.digest])
                    raise positions.mixed_up(
                        f"rank {positions.member} {mine.text}{ours} while rank {rank} {other.text}{theirs}, "
                        f"as collective number {other.number} of the group"
                    )
            last = "; last collective, number {0} of the group: {3}".format(*history[-1]) if history else ""
            lines.append(f"  rank {rank} (another host): {report['state']}{last}")
        if silent:
            lines.append(f"  no word yet of {list_ranks(silent)}")
        return "".join(f"\n{line}" for line in lines)

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._name}/{rank}"
        stored = self._do(lambda store: store.get(key) if store.check([key]) else None)
        return None if stored is None else dict(json.loads(stored))

    def _do(self, action: Any) -> Any:
        if self._store is None:
            return None
        try:
            return action(self._store)
        except RuntimeError:  # the rank that keeps it has ended
            self._store = None
            return None


_bulletins: weakref.WeakKeyDictionary[GroupPositions, Bulletin] = weakref.WeakKeyDictionary()


def bulletin_of(positions: GroupPositions) -> Bulletin:
    """Returns the bulletin of a group, the same to all callers."""
    if positions not in _bulletins:
        _bulletins[positions] = Bulletin(positions)
    return _bulletins[positions]
