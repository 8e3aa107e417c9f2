"""What follows reductions: who waits for the last one of a tree's backwards, and who updates units meanwhile.

`BackwardEnd` knows the first, and what that forbids; `Updates` when a unit has got all its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch.distributed as dist

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime.arrivals import Progress
from fsdp_wrap._runtime.offloading import Offloading
from fsdp_wrap._runtime.unit import Unit, Updater


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


class Updates:
    """Which units of a tree are updated in the running backward, each once it has got all its gradients.

    That is known of a unit whose forward ran once since the last backward, when its own backward is over and
    its reduction is done. All others wait for the end of the backward: further uses need their parameters, or
    add to their gradients.

    Args:
        offloading: What brings gradients to the host, if anything does.

    Attributes:
        reduced: The units that have got gradients and are to be updated.
        updated: Those that the running backward has updated.
    """

    def __init__(self, offloading: Offloading | None) -> None:
        self._offloading = offloading
        self._updaters: dict[Updater, None] = {}
        self.reduced: dict[Unit, None] = {}
        self.updated: set[Unit] = set()
        self._last = True
        self._recomputed: dict[Unit, int] = {}  # in which graph task, last
        self._updated_in: dict[Unit, int] = {}  # those of units that were updated after a recomputation

    def begin(self, units: Iterable[Unit], last: bool) -> None:
        """Begins a backward.

        Args:
            units: Of the tree.
            last: Whether it ends by itself: otherwise its gradients wait for those of a later one.
        """
        self._updaters = dict.fromkeys(unit.updater for unit in units if unit.updater is not None)
        self.updated.clear()
        self._last = last
        for updater in self._updaters:
            updater.begin()

    def refuse_updated(self, unit: Unit) -> None:
        """Refuses to compute with a unit that the running backward has updated.

        Raises:
            RuntimeError: If it has.
        """
        if unit in self.updated:
            raise _come_again(unit)

    def recompute(self, unit: Unit) -> None:
        """Notes that a unit with an updater is recomputed.

        Raises:
            RuntimeError: If it was updated in the running backward, or in one inside it that has ended, as
                those of checkpoints do which run a backward of their own.
        """
        task = graph_task()
        if unit in self.updated or self._updated_in.get(unit) == task:
            raise _come_again(unit)
        self._recomputed[unit] = task

    def after(self, unit: Unit) -> None:
        """Notes that a unit's gradients were reduced, and updates it if no more can come.

        Raises:
            RuntimeError: If this backward has updated it before.
        """
        self.note(unit)
        self.update(unit)

    def note(self, unit: Unit) -> None:
        """Notes that a unit's gradients were reduced, and are on their way to the host perhaps.

        Raises:
            RuntimeError: As `after`.
        """
        if unit.updater is not None:
            self.refuse_updated(unit)
            self.reduced[unit] = None

    def update(self, unit: Unit) -> None:
        """Updates a unit whose gradients were reduced, if no more can come."""
        if unit in self.reduced and unit.updater is not None and not unit.updater.communicates:
            self._update(unit, unit.updater)

    def between_collectives(self) -> None:
        """Updates what waits for this place, between the same collectives on all ranks."""
        for unit in [*self.reduced]:
            if unit.updater is not None:
                self._update(unit, unit.updater)

    def _update(self, unit: Unit, updater: Updater) -> None:
        handle = unit.handle
        if handle is None or updater.waits or not self._last or unit.forwards > 1:
            return
        if unit.arrivals.progress is not Progress.FINISHED:
            return
        if handle.reduction is not None or handle.holds_gradients or handle.keeps_gradients:
            return  # more is to come, or to be summed
        del self.reduced[unit]
        self._note(unit)
        travels = self._offloading is not None and self._offloading.leave(unit)
        updater.update(unit, partial(self._offloading.take, unit) if self._offloading and travels else None)

    def _note(self, unit: Unit) -> None:
        self.updated.add(unit)
        self._updated_in[unit] = self._recomputed.pop(unit, -1)

    def finish(self, units: Iterable[Unit]) -> None:
        """Ends a backward whose gradients are all there: updates the units that are left."""
        reduced, self.reduced = [*self.reduced], {}
        updaters, self._updaters = self._updaters, {}
        complete = [unit for unit in reduced if unit.handle is not None and not unit.handle.keeps_gradients]
        for unit in complete:
            self._note(unit)
        for updater in updaters:
            updater.finish([unit for unit in complete if unit.updater is updater])
        self._forget(units)

    def abandon(self, units: Iterable[Unit]) -> None:
        """Ends a backward that has failed."""
        reduced, self.reduced = [*self.reduced], {}
        updaters, self._updaters = self._updaters, {}
        for updater in updaters:
            updater.abandon([unit for unit in reduced if unit.updater is updater])
        self._forget(units)

    def _forget(self, units: Iterable[Unit]) -> None:
        self.updated.clear()
        for unit in units:
            unit.forwards = 0


def _come_again(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"the running backward comes to {unit.name} again on rank {dist.get_rank()}, after it has updated "
        "its parameters (step_in_backward): no forward before it has told that it would; use checkpoints "
        "with use_reentrant=False, or step after the backward"
    )
