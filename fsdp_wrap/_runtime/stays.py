"""How long the full parameters of a unit stay: the one decision that frees or keeps them."""

from __future__ import annotations

import torch

from fsdp_wrap._params import Until
from fsdp_wrap._runtime.unit import ForwardCall, Unit


def before_forward(unit: Unit) -> Until:
    """Returns how long full parameters stay that an earlier iteration has left, when a new one begins."""
    handle = unit.handle
    if handle.stays is Until.NEXT or not unit.options.reshards_after_backward:
        if handle.is_current:
            return handle.stays
    elif handle.stays in (Until.BACKWARD, Until.EARLIER):
        # Forwards of modules around the unit may have computed with them: a tied output, a loss.
        handle.shown.show_sharded()
        if handle.is_current and not handle.holds_changes:
            return Until.EARLIER
    return Until.NOW


def after_forward(call: ForwardCall, with_grad: bool, is_root: bool, partly: bool) -> Until:
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


def after_backward(unit: Unit, syncs: bool) -> Until:
    """Returns how long the parameters stay after the unit's backward.

    Args:
        unit: The unit.
        syncs: Whether gradients are reduced. Under `no_sync` a unit that a forward does not free stays.
    """
    options = unit.options
    freed = options.reshards_after_backward and (options.reshard_after_forward or syncs)
    return Until.NOW if freed else Until.NEXT


def _needed_in_backward(call: ForwardCall, with_grad: bool, is_root: bool) -> bool:
    unit, options = call.unit, call.unit.options
    if not torch.is_grad_enabled():
        return False
    if not with_grad:  # gradients may enter where no hook sees them
        return call.watched > 0 or unit.handle.trainable
    if is_root and options.keeps_as_root:  # its backward comes first
        return unit.trains
    return not options.reshard_after_forward
