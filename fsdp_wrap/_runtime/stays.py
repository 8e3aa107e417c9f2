"""How long the full parameters of a unit stay: the decisions, and `Stays`, which frees or keeps by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from fsdp_wrap._core import Phase
from fsdp_wrap._params import Until
from fsdp_wrap._runtime.doing import Doing
from fsdp_wrap._runtime.unit import ForwardCall, Unit


class WaitingCall(NamedTuple):
    """A forward call whose unit stays full until the outermost forward ends.

    Attributes:
        call: The forward call.
        inputs: The nodes of its watched inputs.
    """

    call: ForwardCall
    inputs: list[Node]


class Stays:
    """Frees or keeps the full parameters of a tree's units, wherever a forward could free them.

    Args:
        root: The units of the root's module.

    Attributes:
        waiting: Calls of units that stay until the outermost forward ends: those with parts that have not all
            run, and those that do not reshard after forward.
    """

    def __init__(self, root: Sequence[Unit]) -> None:
        self._root = root
        self.waiting: dict[Unit, WaitingCall] = {}
        self._read_by_earlier: set[Unit] = set()  # in backwards of forwards before this one

    def begin_iteration(self, unit: Unit) -> None:
        """Frees the full parameters that an earlier iteration has left, or keeps them."""
        buffers = unit.buffers
        if buffers.stays in (Until.BACKWARD, Until.EARLIER):
            self._read_by_earlier.add(unit)
        until = before_iteration(unit)
        if until is Until.NOW:
            unit.reshard(Phase.FORWARD)
        elif until is not buffers.stays:
            buffers.stay(until)

    def gather_anew(self, units: Iterable[Unit]) -> None:
        """Frees what a forward of an earlier iteration has left of units that run: a write may go unseen."""
        for unit in units:
            if unit.buffers.stays is Until.EARLIER:
                unit.reshard(Phase.FORWARD)

    def end_forward(self, call: ForwardCall, inputs: list[Node], with_grad: bool) -> None:
        """Frees or keeps the full parameters of a unit whose forward has returned.

        Args:
            call: The forward call.
            inputs: The nodes of its watched inputs.
            with_grad: Whether an output needs a gradient.
        """
        unit = call.unit
        partly = bool(unit.parts) and not unit.ran(call.part)
        until = after_call(call, with_grad, unit in self._root, partly)
        if until is Until.OUTERMOST:
            self.waiting[unit] = WaitingCall(call, inputs)
        else:
            self.waiting.pop(unit, None)
            self._leave(unit, until, with_grad)

    def take_waiting(self) -> list[WaitingCall]:
        """Takes the calls that have waited for the outermost forward; `end_outermost` ends each."""
        waiting, self.waiting = self.waiting, {}
        return [*waiting.values()]

    def end_outermost(self, call: ForwardCall, with_grad: bool) -> None:
        """Frees or keeps the full parameters of a unit that has waited."""
        unit = call.unit
        alone = unit.partly_ran and unit.running > 0  # a single part: others may follow
        unit.restart()
        self._leave(unit, after_outermost(call, with_grad, unit in self._root, alone), with_grad)

    def _leave(self, unit: Unit, until: Until, with_grad: bool) -> None:
        buffers = unit.buffers
        if until is Until.BACKWARD:
            buffers.stay(until)
        elif unit in self._read_by_earlier and not buffers.holds_changes:
            buffers.stay(Until.EARLIER)
        else:
            unit.reshard(Phase.FORWARD, unit.options.reshards_within if with_grad else None)

    def drop_waiting(self) -> None:
        """Frees the units that still wait for an outermost forward, which has raised."""
        for unit in self.waiting:
            unit.restart()
            unit.reshard(Phase.FORWARD)
        self.waiting = {}

    def begin_backward(self) -> None:
        """Keeps parameters of earlier forwards for the backward that begins: recomputation reads them."""
        for unit in self._read_by_earlier:
            if unit.buffers.stays is Until.EARLIER:
                unit.buffers.stay(Until.BACKWARD)

    def end_backward(self) -> None:
        """Forgets which units the backward has read, which has ended."""
        self._read_by_earlier.clear()


def before_iteration(unit: Unit) -> Until:
    """Returns how long full parameters stay that an earlier iteration has left, when a new one begins."""
    buffers = unit.buffers
    if buffers.stays is Until.NEXT or not unit.options.reshards_after_backward:
        if buffers.is_current:
            return buffers.stays
    elif buffers.stays in (Until.BACKWARD, Until.EARLIER):
        # Forwards of modules around the unit may have computed with them: a tied output, a loss.
        buffers.shown.show_sharded()
        if buffers.is_current and not buffers.holds_changes:
            return Until.EARLIER
    return Until.NOW


def after_call(call: ForwardCall, with_grad: bool, is_root: bool, partly: bool) -> Until:
    """Returns how long the parameters stay after a forward call.

    Args:
        call: The forward call.
        with_grad: Whether an output needs a gradient.
        is_root: Whether the unit is the root, or one of its module's over another mesh.
        partly: Whether parts of the unit have not run.
    """
    if partly:
        return Until.OUTERMOST
    if _needed_in_backward(call, with_grad, is_root):
        return Until.BACKWARD
    return Until.NOW if call.unit.options.reshard_after_forward else Until.OUTERMOST


def after_outermost(call: ForwardCall, with_grad: bool, is_root: bool, alone: bool) -> Until:
    """Returns how long parameters that have stayed so far stay after the outermost forward.

    Args:
        call: The last forward call of their unit.
        with_grad: Whether an output of the outermost forward needs a gradient.
        is_root: Whether the unit is the root, or one of its module's over another mesh.
        alone: Whether a part of the unit was the outermost forward, so others may follow.
    """
    return Until.BACKWARD if alone or _needed_in_backward(call, with_grad, is_root) else Until.NOW


def after_backward(unit: Unit, syncs: bool, keeps_graph: bool) -> Until:
    """Returns how long the parameters stay after the unit's backward.

    Args:
        unit: The unit.
        syncs: Whether gradients are reduced. Under `no_sync` a unit that a forward does not free stays.
        keeps_graph: Whether gradients have graphs (`create_graph`), whose own backward needs the parameters.
    """
    options = unit.options
    if keeps_graph and (unit.doing is Doing.BACKWARD or unit.buffers.stays is Until.BACKWARD):
        return Until.FORWARD
    freed = options.reshards_after_backward and (options.reshard_after_forward or syncs)
    return Until.NOW if freed else Until.NEXT


def _needed_in_backward(call: ForwardCall, with_grad: bool, is_root: bool) -> bool:
    if not torch.is_grad_enabled():
        return False
    if not with_grad:  # gradients may enter where no hook sees them
        return call.watched > 0 or call.unit.buffers.segments.trainable
    return kept_for_backward(call.unit, is_root)


def kept_for_backward(unit: Unit, is_root: bool) -> bool:
    """Whether a forward of a unit, whose output needs a gradient, keeps the parameters for the backward."""
    if is_root and unit.options.keeps_as_root:  # its backward comes first
        return unit.trains
    return not unit.options.reshard_after_forward
