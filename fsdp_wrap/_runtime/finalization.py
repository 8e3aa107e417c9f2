"""`BackwardEnd`: when the last reduction of a backward is waited for, and who ends backwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime.unit import Unit


class BackwardEnd:
    """The end of a tree's backwards: by their final callbacks, by a later backward's, or by the user.

    `below` has the ends of the former roots in this tree. None of them may be manual.
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
        self._began_manual: bool | None = None  # as the unfinished backwards began
        self._issued: object | None = None
        self._completes = False

    def set_last(self, last: bool) -> None:
        """Sets whether the final callback of a backward waits, or leaves that to the next backward."""
        self._last = last

    def set_manual(self, manual: bool) -> None:
        """Sets whether the user ends backwards; refuses a change in an unfinished backward."""
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
        """Records that a backward begins."""
        if self._began_manual is None:
            self._began_manual = self._manual

    @property
    def waits(self) -> bool:
        """Whether the final callback of the running backward waits and calls `finish`."""
        return self._completes or (self._last and not self._began_manual)

    def complete(self) -> None:
        """Lets the final callback of the running backward wait, whatever the user has set."""
        self._completes = True

    def finish(self) -> None:
        """Records that all reductions have been waited for, or dropped."""
        self._began_manual, self._issued, self._completes = None, None, False

    # by hand

    def check(self, root: Unit, units: Iterable[Unit], in_backward: bool) -> None:
        """Refuses a `finalize_backward` that is too early or would leave sums over replicas incomplete."""
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
            gradients = unit.buffers.gradients
            if not unit.defers:
                continue
            if gradients.partly_summed or (gradients.untaken and unit.options.syncs):
                raise RuntimeError(
                    f"gradients of {unit.name} are summed over a part of the ranks only; call "
                    "set_requires_all_reduce(True) before the last backward that finalize_backward() ends"
                )

    def issue(self) -> object:
        """Returns a token of this end, by which the caller waits later (`require_issued`)."""
        self._issued = object()
        return self._issued

    def require_issued(self, issued: object) -> None:
        """Refuses the token of an end that `reset_iter_state` has dropped."""
        if issued is not self._issued:
            raise RuntimeError("reset_iter_state() has dropped the reduction that this handle stands for")

    def require_waited(self, doing: str) -> None:
        """Refuses an action before the user has waited for the last end."""
        if self._issued is not None:
            raise RuntimeError(
                f"{doing} must not begin before wait() of the handle that "
                "finalize_backward(async_op=True) returned"
            )
