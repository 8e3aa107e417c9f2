"""`BackwardSteps`: updates each unit when its reduction is done, and its gradients go at once.

The optimizer is one for all units. For a unit it steps with groups and state that have just the unit's
parameters; between backwards it is what it always was, and so are its state dicts. `UnitUpdates`, the
plug-in of each tree, says when a unit can be updated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import HostLane
from fsdp_wrap._core import Computing, PlugIn, Precedence, SpanKind, count_step, counted_before, warn_caller
from fsdp_wrap._core.torch_private import graph_task, hook_gradient, will_run
from fsdp_wrap._params import Buffers
from fsdp_wrap._runtime import Doing, Step, Unit, buffers_of, step_of
from fsdp_wrap._state import NormInParts, scale_to
from fsdp_wrap.optim._in_backward.unit_params import ScaledUnit, UnitParams
from fsdp_wrap.optim._on_shards import put_in_order

_NEVER = -1  # the number of no node
_NO_OUTPUTS: tuple[set[int], set[int]] = set(), set()


class BackwardSteps:
    """Updates the units of a model while backwards run; made by `step_in_backward`.

    Args:
        optimizer: The optimizer.
        units: The units of the model.
        max_norm: See `step_in_backward`.
        clip_value: See `step_in_backward`.
        scaler: See `step_in_backward`.
        lane: Where the updates run; None for the thread of the backward.

    Attributes:
        total_norm: The last finite norm of all gradients, before clipping, with `max_norm`: 0-d, float64, the
            same on all ranks. None before the first backward.
        communicates: Whether updates do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[Unit],
        max_norm: float | None,
        clip_value: float | None,
        scaler: GradScaler | None,
        lane: HostLane | None,
    ) -> None:
        self._updated: list[str] = []
        self.total_norm: torch.Tensor | None = None
        self.communicates = scaler is not None and scaler.is_enabled()
        self._max_norm, self._clip_value, self._scaler, self._lane = max_norm, clip_value, scaler, lane
        self._optimizer = optimizer
        self._parts: MutableMapping[Unit, UnitParams] = WeakKeyDictionary()
        self._trees: MutableMapping[Step, UnitUpdates] = WeakKeyDictionary()
        self._joins = _UpdatesLater(self._update_in)
        self._overflowed = self._began = False
        self._entries = 0  # of the optimizer's state, when it was put in order
        self._scaled: MutableMapping[Unit, ScaledUnit] = WeakKeyDictionary()
        theirs = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for unit in units:
            params = [param for param in sharded_params(unit) if id(param) in theirs]
            if params:
                self._parts[unit] = UnitParams(optimizer, params)
                unit.plug_ins.attach(self._joins)
        all_buffers = buffers_of(self._parts)
        self._norm = NormInParts(all_buffers) if max_norm is not None and all_buffers else None
        for step in dict.fromkeys(map(step_of, self._parts)):
            if step not in self._trees:
                self._update_in(step)

    def _update_in(self, tree: Step) -> None:
        """Updates the model's units in the backwards of a tree."""
        updates = self._trees[tree] = UnitUpdates(self, self._parts)
        tree.plug_ins.attach(updates)

    @property
    def updated(self) -> list[str]:
        """Names of the units that the running backward has updated, or the last one has.

        Waits for updates in a thread: after a backward that raised they may still go on.
        """
        if self._lane is not None:
            self._lane.settle()
        return self._updated

    @property
    def waits(self) -> bool:
        """Whether units of the running backward are updated at its end: no norm is known before."""
        return self._norm is not None and self.total_norm is None

    def remove(self) -> None:
        """Ends the updates: later backwards keep gradients, and the program calls the optimizer's `step`.

        Raises:
            RuntimeError: Inside a forward or backward.
        """
        require_idle(self._parts, "remove()")
        for unit in [*self._parts]:
            unit.plug_ins.detach(self._joins)
            del self._parts[unit]
        for step, updates in self._trees.items():
            step.plug_ins.detach(updates)
        self._trees.clear()
        steps_of.pop(self._optimizer, None)

    # what its plug-ins call

    def begin(self) -> None:
        """Prepares for a backward that begins."""
        self._updated, self._overflowed, self._began = [], False, False
        if self._norm is not None:
            self._norm.forget()  # what one that failed has left

    def update(self, unit: Unit, arrive: Callable[[], None] | None) -> None:
        """Updates a unit, after `arrive`, if given, has added its gradients to the sharded parameters.

        Args:
            unit: The unit.
            arrive: Adds the gradients that the reduction has brought.
        """
        part, buffers, norm = self._parts[unit], unit.buffers, self.total_norm
        self._began = True
        if not self.communicates:
            self._issue(partial(self._apply, unit, part, norm, buffers, arrive))
            return
        if arrive is not None:
            arrive()
        self._unscale(unit)
        self._step_scaled(unit, partial(self._apply, unit, part, norm, buffers))

    def finish(self, left: Sequence[Unit]) -> None:
        """Updates the remaining units once all gradients are there; waits for all updates.

        Args:
            left: The units that were not updated.
        """
        waits = self.waits
        if waits:
            self._update_all(left)
        else:
            for unit in left:
                self.update(unit, None)
        if self._lane is not None:
            self._lane.finish()
        if self._norm is not None and not waits:
            self._take_norm(self._norm)
        for part in self._parts.values():
            part.commit()
        state = self._optimizer.state
        if len(state) != self._entries:  # units were updated in the order of the backward
            self._entries = len(state)
            groups = self._optimizer.param_groups
            put_in_order(state, [param for group in groups for param in group["params"]])

    def abandon(self, left: Sequence[Unit]) -> None:
        """Ends a failed backward: waits for updates that began, and drops the gradients of other units.

        Args:
            left: The units that were not updated.
        """
        if self._lane is not None:
            self._lane.abandon()
        for unit in left:
            self._parts[unit].free()
        if self.updated:
            warn_caller(
                f"a backward raised after {len(self.updated)} of {len(self._parts)} units had been updated "
                f"(step_in_backward) on rank {dist.get_rank()}: {', '.join(self.updated)}; the others have "
                "kept their values: load a checkpoint, or go on with the next batch"
            )

    # steps that several of the above share

    def _issue(self, work: Callable[[], None]) -> None:
        # Counted here, where all ranks are alike: steps outdate what is kept, and a thread takes them at any
        # time.
        count_step()
        if self._lane is None:
            work()
        else:
            self._lane.issue(work)

    def _apply(self, unit: Unit, *work: Any) -> None:
        """Updates a unit, as `_clip_and_step` says."""
        beside = self._lane is not None
        with unit.plug_ins.span(SpanKind.UPDATE, None, (unit,), beside=beside), counted_before():
            self._clip_and_step(unit.name, *work)

    @torch.no_grad()
    def _clip_and_step(
        self,
        name: str,
        part: UnitParams,
        norm: torch.Tensor | None,
        buffers: Buffers | None = None,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        """Clips the gradients of a unit, lets the optimizer step with them, and frees them."""
        if arrive is not None:
            arrive()
        try:
            if self._norm is not None and buffers is not None:
                self._norm.add(buffers)
            if norm is not None and self._max_norm is not None:
                scale_to(part.gradients(), norm, self._max_norm)
            if self._clip_value is not None:
                for grad in part.gradients():
                    grad.clamp_(-self._clip_value, self._clip_value)
            if part.has_gradients:
                part.step()
                self._updated.append(name)
        finally:
            part.free()

    @torch.no_grad()
    def _update_all(self, left: Sequence[Unit]) -> None:
        """Updates all units of a backward, clipped by its own norm, which the next backward uses too."""
        assert self._norm is not None
        if not left:
            return
        for unit in left:
            if self.communicates:
                self._unscale(unit)
            self._norm.add(unit.buffers)
        total = self._norm.total()
        if total.isfinite():
            self.total_norm = total
        elif self.communicates:
            self._overflowed = True
        for unit in left:
            work = partial(self._apply, unit, self._parts[unit], total)
            if self.communicates:
                self._step_scaled(unit, work)
            else:
                self._issue(work)

    def _take_norm(self, norm: NormInParts) -> None:
        """Keeps the norm of a backward that ends, if it is finite, for the next one; collective."""
        before = self.total_norm
        if self._overflowed or not self._began or before is None:
            norm.forget()
            return
        total = norm.total()
        self.total_norm = torch.where(total.isfinite(), total, before)

    def _unscale(self, unit: Unit) -> None:
        """Divides the gradients of a unit by the scale; collective."""
        if self._scaler is not None and not self._overflowed and self._parts[unit].has_gradients:
            self._scaler.unscale_(self._scaled_of(unit))

    def _step_scaled(self, unit: Unit, work: Callable[[], None]) -> None:
        """Runs a unit's update, unless its gradients or those of an earlier unit have overflowed."""
        part = self._parts[unit]
        if self._scaler is None or not part.has_gradients:
            return
        scaled = self._scaled_of(unit)
        if not self._overflowed:
            scaled.offer(partial(self._issue, work))
            self._scaler.step(scaled)
            self._overflowed = not scaled.stepped
        if self._overflowed:
            part.free()

    def _scaled_of(self, unit: Unit) -> Any:
        """Returns the unit's parameters in the form that the scaler takes."""
        if unit not in self._scaled:
            self._scaled[unit] = ScaledUnit(self._parts[unit])
        return self._scaled[unit]


class _UpdatesLater(PlugIn):
    """Updates units in the trees that they join later."""

    def __init__(self, update_in: Callable[[Step], None]) -> None:
        self._update_in = update_in

    def made(self, step: Step) -> None:
        self._update_in(step)


class UnitUpdates(PlugIn):
    """Says when the units of one tree are updated: each once its gradients are complete.

    A unit whose forward ran once since the last backward is complete when its own backward is over, the
    gradients of all its outputs have come and its reduction is done. All other units wait for the end of the
    backward, since a further use needs their parameters or adds to their gradients.

    Args:
        steps: Updates them.
        units: The units that `steps` updates, also those of other trees.
    """

    order = Precedence.UPDATES

    def __init__(self, steps: BackwardSteps, units: Collection[Unit]) -> None:
        self._steps, self._units = steps, units
        self._begun = False  # whether a backward has begun whose gradients are not complete
        self._last = True  # whether no later backward completes them
        self._reduced: dict[Unit, None] = {}  # units with gradients, not updated yet
        self._updated: set[Unit] = set()  # in the running backward
        self._outputs: dict[Unit, tuple[set[int], set[int]]] = {}  # awaited and come, by number of their node
        self._recomputed: dict[Unit, int] = {}  # the graph task of the last recomputation
        self._updated_in: dict[Unit, int] = {}  # the graph task of the recomputation before the last update

    @property
    def updated_units(self) -> Collection[Unit]:
        return self._units

    # which units are complete

    def backward_opens(self, step: Step) -> None:
        self._begun, self._last = True, step.ending.waits and not step.plug_ins.shadowed
        self._updated.clear()
        self._outputs.clear()
        self._steps.begin()

    def enters(self, unit: Unit, what: Computing) -> None:
        """Refuses to compute with a unit that the running backward has updated.

        An inner backward may have, too, such as that of a checkpoint with `use_reentrant=True`.
        """
        if what is Computing.FORWARD or unit not in self._units:
            return
        task = graph_task()
        recompute = what is Computing.RECOMPUTE
        if unit in self._updated or (recompute and self._updated_in.get(unit) == task):
            raise _come_again(unit)
        if recompute:
            self._recomputed[unit] = task

    def hooked(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        """Lets the update of a unit wait for the gradients of several outputs.

        The last leaf may have its gradient before some output does, whose backward needs the unit again.
        """
        if unit not in self._units:
            return
        owners = [(output, output.grad_fn) for output in outputs if output.grad_fn is not None]
        nodes = {node._sequence_nr(): node for _, node in owners}
        for output, node in owners if len(nodes) > 1 else ():
            number = node._sequence_nr()
            # An earlier node must not know later ones, which refer to it: the cycle would never be collected.
            earlier = {before: other for before, other in nodes.items() if before < number}
            hook_gradient(output, partial(self._on_output, unit, frozenset(nodes), number, earlier))

    def _on_output(
        self, unit: Unit, every: frozenset[int], number: int, earlier: Mapping[int, Node], _: torch.Tensor
    ) -> None:
        """Notes that an output's gradient has come, and which other outputs will get none."""
        awaited, come = self._outputs.setdefault(unit, (set(), set()))
        awaited |= every
        come |= {number, *(before for before, node in earlier.items() if not will_run([node]))}
        if unit.doing is Doing.OVER:
            awaited.add(_NEVER)  # it is unsharded again, until the end

    def reduced(self, unit: Unit) -> None:
        """Updates what is complete, but for units whose gradients are on their way to the host."""
        if unit in self._units:
            if unit in self._updated:
                raise _come_again(unit)
            self._reduced[unit] = None
        if not self._steps.communicates:
            self._update(unit for unit in self._reduced if not unit.buffers.gradients.arriving)

    def before_reduction(self, step: Step) -> None:
        """Updates all that is complete: updates that communicate do so here."""
        self._update(self._reduced)

    def _update(self, units: Iterable[Unit]) -> None:
        for unit in [*units]:
            if self._is_complete(unit):
                del self._reduced[unit]
                self._note(unit)
                self._steps.update(unit, unit.buffers.gradients.take_arriving())

    def _is_complete(self, unit: Unit) -> bool:
        if self._steps.waits or not self._last or unit.forwards > 1:
            return False
        awaited, come = self._outputs.get(unit, _NO_OUTPUTS)
        if unit.doing is not Doing.OVER or not awaited <= come:
            return False
        gradients = unit.buffers.gradients  # of which a reduction or a sum may still be due
        return gradients.reduction is None and not (gradients.untaken or gradients.unsummed)

    def _note(self, unit: Unit) -> None:
        self._updated.add(unit)
        self._updated_in[unit] = self._recomputed.pop(unit, -1)

    # the end

    def backward_closes(self, step: Step, complete: bool) -> None:
        """Updates the units that are left when all gradients are complete."""
        if not complete:
            return
        begun, reduced = self._end()
        left = [unit for unit in reduced if unit.params and not unit.buffers.gradients.unsummed]
        for unit in left:
            self._note(unit)
        if begun:
            self._steps.finish(left)
        self._updated.clear()

    def dropped(self, step: Step) -> None:
        """Ends a failed backward without further updates."""
        begun, reduced = self._end()
        if begun:
            self._steps.abandon(reduced)
        self._updated.clear()

    def _end(self) -> tuple[bool, list[Unit]]:
        """Returns whether a backward had begun, and the units with gradients that were not updated."""
        begun, reduced = self._begun, [*self._reduced]
        self._begun, self._reduced = False, {}
        return begun, reduced


def _come_again(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"the running backward comes to {unit.name} again on rank {dist.get_rank()}, after it has updated "
        "its parameters (step_in_backward): no forward before it has told that it would; use checkpoints "
        "with use_reentrant=False, or step after the backward"
    )


steps_of: MutableMapping[torch.optim.Optimizer, weakref.ref[BackwardSteps]] = WeakKeyDictionary()
"""The `BackwardSteps` of optimizers: units hold them, and they hold the optimizer."""


def sharded_params(unit: Unit) -> list[nn.Parameter]:
    """Returns the sharded parameters of a unit."""
    return [param for sharded in unit.params for param in sharded.sharded_params]
