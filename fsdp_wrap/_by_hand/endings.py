"""`ManualEnd`: backwards whose last reductions the user waits for (`finalize_backward`)."""

from __future__ import annotations

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime import BackwardEnd, Step, Unit


class ManualEnd(BackwardEnd):
    """Leaves the end of a tree's backwards to the user."""

    manual = True

    def __init__(self, last: bool) -> None:
        super().__init__(last)
        self._issued: object | None = None

    @property
    def waits(self) -> bool:
        return self._completes

    def finish(self) -> None:
        super().finish()
        self._issued = None

    def issue(self) -> object:
        """Returns a token of this end, by which the caller waits later (`require_issued`)."""
        self._issued = object()
        return self._issued

    def require_issued(self, issued: object) -> None:
        """Refuses the token of an end that `reset_iter_state` has dropped."""
        if issued is not self._issued:
            raise RuntimeError("reset_iter_state() has dropped the reduction that this handle stands for")

    def require_waited(self, doing: str) -> None:
        if self._issued is not None:
            raise RuntimeError(
                f"{doing} must not begin before wait() of the handle that "
                "finalize_backward(async_op=True) returned"
            )

    def refuse_enclosing(self, unit: Unit) -> None:
        raise RuntimeError(
            f"set_manual_backward_finalization() was called on {unit.name}, which another unit "
            "encloses now; call it on the root"
        )


def set_manual(step: Step, manual: bool) -> None:
    """Sets whether the user ends backwards; refuses a change in an unfinished backward."""
    ending = step.ending
    if manual is ending.manual:
        return
    if ending.unfinished or graph_task() != -1:
        raise RuntimeError(
            "set_manual_backward_finalization() was called when a backward had begun and had not ended: "
            "call finalize_backward() or reset_iter_state() first"
        )
    step.ending = ManualEnd(ending.last) if manual else BackwardEnd(ending.last)
