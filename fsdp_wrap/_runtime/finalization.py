"""`BackwardEnd`: who waits for the last reduction of a tree's backwards, and what that forbids meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime.unit import Unit


class BackwardEnd:
    """Who ends the backwards of a tree: each its own final callback, a later one's, or the user.

    Args:
        below: Those of trees below this one, that were roots until now.

    Raises:
        RuntimeError: If the user was to end backwards there.
    """

    def __init__(self, below: Mapping[Unit, BackwardEnd]) -> None:
        for unit, end in below.items():
            if end.manual:
                raise RuntimeError(
                    f"set_manual_backward_finalization() was called on {unit.name}, which another unit "
                    "encloses now; call it on the root"
                )
        self._last = True
        self._manual = False
        self._began_manual: bool | None = None  # how the backwards that nobody has ended yet began
        self._issued: object | None = None

    def set_last(self, last: bool) -> None:
        """Decides whether the final callback of a backward waits, or leaves that to the next backward's."""
        self._last = last

    def set_manual(self, manual: bool) -> None:
        """Decides whether the user waits instead.

        Raises:
            RuntimeError: If that changes in a backward, or after one that nobody has ended.
        """
        began = self._began_manual
        changes = manual != self._manual and graph_task() != -1
        if changes or (began is not None and manual != began):
            raise RuntimeError(
                "set_manual_backward_finalization() was called when a backward had begun and had not ended: "
                "call finalize_backward() or reset_iter_state() first"
            )
        self._manual = manual

    @property
    def manual(self) -> bool:
        """Whether the user ends backwards."""
        return self._manual if self._began_manual is None else self._began_manual

    # a backward

    def begin(self) -> None:
        """Notes that a backward begins."""
        if self._began_manual is None:
            self._began_manual = self._manual

    @property
    def automatic(self) -> bool:
        """Whether the final callback of the running backward is to wait, and then to `finish`."""
        return self._last and not self.manual

    def finish(self) -> None:
        """Notes that everything has been waited for, or dropped."""
        self._began_manual = self._issued = None

    # by hand

    def check(self, root: Unit, units: Iterable[Unit], in_backward: bool) -> None:
        """Refuses to end backwards by hand now.

        Raises:
            RuntimeError: If they end by themselves, one is running, the last end was not waited for, or sums
                over replicas would stay incomplete.
        """
        self.require_waited("finalize_backward()")
        if not self.manual:
            raise RuntimeError(
                f"the backwards of {root.name} end by themselves; to end them by finalize_backward(), call "
                "set_manual_backward_finalization(True) before the forward"
            )
        if in_backward:
            raise RuntimeError(
                "finalize_backward() was called inside a backward, or after one that raised; call it after "
                "backward(), or reset_iter_state()"
            )
        for unit in units:
            handle = unit.handle
            if handle is None or not unit.defers:
                continue
            partial = any(segment.gradients.partial is not None for segment in handle.segments)
            if partial or (handle.holds_gradients and unit.options.syncs):
                raise RuntimeError(
                    f"gradients of {unit.name} are summed over a part of the ranks only; call "
                    "set_requires_all_reduce(True) before the last backward that finalize_backward() ends"
                )

    def issue(self) -> object:
        """Lets the caller wait later; returns what `require_issued` takes."""
        self._issued = object()
        return self._issued

    def require_issued(self, issued: object) -> None:
        """Refuses what `issue` has not returned, or what was dropped since.

        Raises:
            RuntimeError: If it is so.
        """
        if issued is not self._issued:
            raise RuntimeError("reset_iter_state() has dropped the reduction that this handle stands for")

    def require_waited(self, doing: str) -> None:
        """Refuses what must wait for the last end.

        Raises:
            RuntimeError: If it was not waited for.
        """
        if self._issued is not None:
            raise RuntimeError(
                f"{doing} must not begin before wait() of the handle that "
                "finalize_backward(async_op=True) returned"
            )
