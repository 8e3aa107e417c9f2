"""When a unit's backward is over: the one decision that ends it before the final callback does."""

from __future__ import annotations

from enum import Enum

import torch

from fsdp_wrap._params import Until
from fsdp_wrap._runtime.unit import Unit


class Done(Enum):
    """What is over of a unit's backward.

    Attributes:
        NOTHING: Gradients are awaited, or nothing tells that all have come: a later trigger ends it, or the
            final callback.
        GRADIENTS: All gradients of its parameters are there. Its full parameters may be needed.
        ALL: Its full parameters are not needed any more either.
    """

    NOTHING = "nothing"
    GRADIENTS = "its gradients"
    ALL = "all"


def ends(unit: Unit, last_input: bool) -> Done:
    """Returns what is over of a unit's backward, and of those tied to it, when a gradient has come.

    Args:
        unit: The unit that has got the gradient.
        last_input: Whether it is that of the last input that the unit awaits; else that of a parameter.
    """
    arrivals = unit.arrivals
    if torch.is_grad_enabled():  # create_graph: a later backward needs the leaves
        return Done.NOTHING
    if unit.group:
        return _group_ends(unit, last_input)
    if last_input:
        if arrivals.missing and unit.gradients_to_come():
            return Done.NOTHING
        return Done.GRADIENTS if unit.buffers.stays is Until.END else Done.ALL
    if arrivals.missing or arrivals.open_calls:
        return Done.NOTHING
    # Frozen leaves may be needed for gradients of inputs after all trainable ones have theirs.
    return Done.GRADIENTS if unit.buffers.stays is Until.END or not unit.all_train else Done.ALL


def _group_ends(unit: Unit, last_input: bool) -> Done:
    """Returns what is over of the backwards of units that some ranks may skip, and of the one around them.

    All ranks must end them at the same place: the last input of the unit around them is one, where none of
    their gradients is to come. The final callback ends all others.
    """
    first = unit.group[0]
    if not first.arrivals.inputs_done or first.forwards > 1 or (unit.arrivals.missing and not last_input):
        return Done.NOTHING
    if any([member.gradients_to_come() for member in unit.group]):
        return Done.NOTHING
    needed = any([member.buffers.stays is Until.END for member in unit.group])
    return Done.GRADIENTS if needed else Done.ALL
