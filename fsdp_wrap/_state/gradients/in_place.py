"""`GradientsInPlace`: gradients take the place of their full parameters, which saves memory in backward."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_wrap._core import Computing, PlugIn, Precedence
from fsdp_wrap._params import Until, Where
from fsdp_wrap._runtime import Step, Unit, after_backward, step_of


class GradientsInPlace(PlugIn):
    """Moves each gradient of its unit into its parameter's memory once nothing needs the values there."""

    order = Precedence.SETTINGS
    copied = True

    def enters(self, unit: Unit, what: Computing) -> None:
        """Ends reductions in flight: memory counts more than overlap with the first gradients."""
        queue = step_of(unit).queue
        if what is Computing.BACKWARD and unit.buffers.segments.sizeable and queue.busy:
            queue.make_room(unit.options.most_reducing - 1)

    def computes(self, unit: Unit, what: Computing) -> None:
        """Puts off the next gather until gradients have taken the place of the parameters."""
        step = step_of(unit)
        if what is Computing.BACKWARD and unit.buffers.segments.bulky and _nothing_needs(step, unit):
            step.queue.prefetch_later(unit)

    def brings(self, unit: Unit, leaf: nn.Parameter) -> None:
        if _nothing_needs(step_of(unit), unit):
            unit.buffers.gradients.take_in_place(leaf)


def _nothing_needs(step: Step, unit: Unit) -> bool:
    """Returns whether the unit's parameters are freed, and its gradients reduced, when its backward ends."""
    buffers = unit.buffers
    needed = unit.running or buffers.stays is Until.END or buffers.where is not Where.FULL
    reduced = step.syncs and unit.options.syncs and not torch.is_grad_enabled()  # no create_graph
    return reduced and not needed and after_backward(unit, step.syncs, keeps_graph=False) is Until.NOW
