"""`BackwardEnd`: when the last reduction of a backward is waited for."""

from __future__ import annotations

from fsdp_wrap._runtime.unit import Unit


class BackwardEnd:
    """The end of a tree's backwards: by their final callbacks, or by that of a later backward.

    Attributes:
        last: Whether the final callback of a backward waits, or leaves that to the next backward.
        unfinished: Whether a backward has begun whose reductions were not all waited for.
        manual: Whether the user ends backwards; see `ManualEnd`.
    """

    manual = False

    def __init__(self, last: bool = True) -> None:
        self.last = last
        self.unfinished = self._completes = False

    def begin(self) -> None:
        """Records that a backward begins."""
        self.unfinished = True

    @property
    def waits(self) -> bool:
        """Whether the final callback of the running backward waits and calls `finish`."""
        return self._completes or self.last

    def complete(self) -> None:
        """Lets the final callback of the running backward wait, whatever the user has set."""
        self._completes = True

    def finish(self) -> None:
        """Records that all reductions have been waited for, or dropped."""
        self.unfinished = self._completes = False

    def require_waited(self, doing: str) -> None:
        """Refuses an action before the user has waited for the last end."""

    def refuse_enclosing(self, unit: Unit) -> None:
        """Raises if another unit must not enclose this root."""
