"""The end of reductions: `BackwardEnd` ends the backwards of a tree, `Updates` updates units meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.graph import Node

from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime.arrivals import Progress
from fsdp_wrap._runtime.offloading import Offloading
from fsdp_wrap._runtime.unit import Unit, Updater, will_run

_NEVER = -1  # the number of no node
_NO_OUTPUTS: tuple[set[int], set[int]] = set(), set()


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
            handle = unit.handle
            if not unit.defers:
                continue
            if handle.keeps_partial or (handle.holds_gradients and unit.options.syncs):
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


class Updates:
    """Updates the units of a tree in the running backward, each once its gradients are complete.

    A unit whose forward ran once since the last backward is complete when its own backward is over, the
    gradients of all its outputs have come and its reduction is done. All other units wait for the end of the
    backward, since a further use needs their parameters or adds to their gradients.
    """

    def __init__(self, offloading: Offloading | None) -> None:
        self._offloading = offloading
        self._updaters: dict[Updater, None] = {}
        self.reduced: dict[Unit, None] = {}  # units with gradients, not updated yet
        self.updated: set[Unit] = set()  # in the running backward
        self._outputs: dict[Unit, tuple[set[int], set[int]]] = {}  # awaited and come, by number of their node
        self._last = True
        self._recomputed: dict[Unit, int] = {}  # the graph task of the last recomputation
        self._updated_in: dict[Unit, int] = {}  # the graph task of the recomputation before the last update

    def begin(self, units: Iterable[Unit], last: bool) -> None:
        """Begins a backward; without `last` its gradients wait for the gradients of a later backward."""
        self._updaters = dict.fromkeys(unit.updater for unit in units if unit.updater is not None)
        self.updated.clear()
        self._outputs.clear()
        self._last = last
        for updater in self._updaters:
            updater.begin()

    def hooks_of(
        self, unit: Unit, outputs: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
        """Yields hooks for the gradients of a forward's outputs; none where they come at once.

        The last leaf may have its gradient before some output does, whose backward needs the unit again.
        """
        owners = [(each, each.grad_fn) for each in outputs if each.grad_fn is not None]
        nodes = {node._sequence_nr(): node for _, node in owners}
        for output, node in owners if len(nodes) > 1 else ():
            number = node._sequence_nr()
            # An earlier node must not know later ones, which refer to it: the cycle would never be collected.
            earlier = {each: before for each, before in nodes.items() if each < number}
            yield output, partial(self._on_output, unit, frozenset(nodes), number, earlier)

    def _on_output(
        self, unit: Unit, every: frozenset[int], number: int, earlier: Mapping[int, Node], _: torch.Tensor
    ) -> None:
        """Notes that the gradient of an output has come, and which of the others will not."""
        awaited, come = self._outputs.setdefault(unit, (set(), set()))
        awaited |= every
        come |= {number, *(each for each, node in earlier.items() if not will_run([node]))}
        if unit.arrivals.progress is Progress.FINISHED:
            awaited.add(_NEVER)  # it is unsharded again, until the end

    def _awaits_outputs(self, unit: Unit) -> bool:
        awaited, come = self._outputs.get(unit, _NO_OUTPUTS)
        return not awaited <= come

    def refuse_updated(self, unit: Unit) -> None:
        """Refuses to compute with a unit that the running backward has updated."""
        if unit in self.updated:
            raise _come_again(unit)

    def recompute(self, unit: Unit) -> None:
        """Records the recomputation of a unit with an updater; refuses it after the unit's update.

        The update may also have come from an inner backward, as of a checkpoint with `use_reentrant=True`.
        """
        task = graph_task()
        if unit in self.updated or self._updated_in.get(unit) == task:
            raise _come_again(unit)
        self._recomputed[unit] = task

    def note(self, unit: Unit) -> None:
        """Records that a unit's gradients were reduced; a copy to the host may still run."""
        if unit.updater is not None:
            self.refuse_updated(unit)
            self.reduced[unit] = None

    def update(self, unit: Unit) -> None:
        """Updates a unit whose gradients were reduced, if they are complete."""
        if unit in self.reduced and unit.updater is not None and not unit.updater.communicates:
            self._update(unit, unit.updater)

    def between_collectives(self) -> None:
        """Updates all complete units, at a place where updaters of all ranks may communicate."""
        for unit in [*self.reduced]:
            if unit.updater is not None:
                self._update(unit, unit.updater)

    def _update(self, unit: Unit, updater: Updater) -> None:
        handle = unit.handle
        if updater.waits or not self._last or unit.forwards > 1:
            return
        if unit.arrivals.progress is not Progress.FINISHED or self._awaits_outputs(unit):
            return
        if handle.reduction is not None or handle.holds_gradients or handle.keeps_gradients:
            return  # a reduction or a sum is still due
        del self.reduced[unit]
        self._note(unit)
        travels = self._offloading is not None and self._offloading.leave(unit)
        updater.update(unit, partial(self._offloading.take, unit) if self._offloading and travels else None)

    def _note(self, unit: Unit) -> None:
        self.updated.add(unit)
        self._updated_in[unit] = self._recomputed.pop(unit, -1)

    def finish(self, units: Iterable[Unit]) -> None:
        """Ends a backward with complete gradients: updates the remaining units."""
        reduced, self.reduced = [*self.reduced], {}
        updaters, self._updaters = self._updaters, {}
        complete = [unit for unit in reduced if unit.layouts and not unit.handle.keeps_gradients]
        for unit in complete:
            self._note(unit)
        for updater in updaters:
            updater.finish([unit for unit in complete if unit.updater is updater])
        self.updated.clear()
        for unit in units:
            unit.forwards = 0

    def abandon(self, units: Iterable[Unit]) -> None:
        """Ends a failed backward without further updates."""
        reduced, self.reduced = [*self.reduced], {}
        updaters, self._updaters = self._updaters, {}
        for updater in updaters:
            updater.abandon([unit for unit in reduced if unit.updater is updater])
        self.updated.clear()
        for unit in units:
            unit.forwards = 0


def _come_again(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"the running backward comes to {unit.name} again on rank {dist.get_rank()}, after it has updated "
        "its parameters (step_in_backward): no forward before it has told that it would; use checkpoints "
        "with use_reentrant=False, or step after the backward"
    )
