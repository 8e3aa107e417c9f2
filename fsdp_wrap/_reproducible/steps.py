"""`CountedSteps`: the backwards of one tree of units, whose gradients are handed over after the last one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_wrap._core import PlugIn, Precedence
from fsdp_wrap._params import Buffers, held_params, to_local
from fsdp_wrap._reproducible.norms import exact_power
from fsdp_wrap._reproducible.refusals import (
    leftovers,
    norms_over_batches,
    refuse_optimizer,
    refuse_others_sums,
    refuse_training,
    too_few,
)
from fsdp_wrap._reproducible.sums import TreeSums
from fsdp_wrap._runtime import Step, Unit
from fsdp_wrap._state import exact_powers


class CountedSteps(PlugIn):
    """Counts the backwards of one tree by the steps of its optimizer.

    Args:
        step: That of the tree.
        micro_batches: Number of micro-batches in a step.
        average: Whether gradients are divided by the number of micro-batches.

    Attributes:
        done: Number of this rank's backwards in the running step.
        backwards: Number of all of them.
    """

    order = Precedence.RANKS
    aligns = True

    def __init__(self, step: Step, micro_batches: int, average: bool) -> None:
        self._step = step
        self._norms = norms_over_batches(step.root.module)
        self.done = self.backwards = 0
        self._open = False
        self._unsynced: list[Unit] = []
        self._sums: dict[Unit, TreeSums] = {}
        self._divisors: dict[Unit, float] = {}
        self._checked = weakref.WeakSet[torch.optim.Optimizer]()
        for unit in step.units:
            if unit.params:
                self._take_over(unit, unit.buffers, micro_batches, average)
        self._per_rank = max((tree_sums.per_rank for tree_sums in self._sums.values()), default=1)
        step.plug_ins.attach(self)
        exact_powers.update(dict.fromkeys(self.params, exact_power))
        _living.add(self)

    def _take_over(self, unit: Unit, buffers: Buffers, leaves: int, average: bool) -> None:
        self._sums[unit] = TreeSums(buffers, leaves)
        buffers.plug_ins.attach(self._sums[unit])
        self._divisors[unit] = buffers.gradients.contributors
        buffers.gradients.divide_by(leaves if average else 1.0)
        unit.set()  # a plan of batched reductions does not fit any more

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return sharded_params(self._sums)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step with incomplete gradients, and optimizers that round by place."""
        held = [*held_params(optimizer).intersection(self.params)]
        if held and (self._open or self.done not in (0, self._per_rank)):
            raise too_few(self.done, self._per_rank)
        if held and optimizer not in self._checked:
            refuse_optimizer(optimizer, held)
            self._checked.add(optimizer)

    def remove(self) -> None:
        """Lets the units sum as usual again."""
        self._drop()
        self._step.plug_ins.detach(self)
        _living.discard(self)
        for param in self.params:
            exact_powers.pop(param, None)
        for unit, divisor in self._divisors.items():
            unit.plug_ins.detach(self._sums[unit])
            unit.buffers.gradients.divide_by(divisor)

    # moments

    def forward_begins(self, step: Step) -> None:
        """Refuses what has been chosen since; ends a step whose backward has failed."""
        if self._open:
            self._drop()
        refuse_training(self._norms)
        for unit in self._sums:
            refuse_others_sums(unit, unit.buffers)

    def backward_begins(self, step: Step) -> None:
        """Begins one of this rank's micro-batches."""
        if self._open:
            self._drop()
        refusal = self._refusal() if self.done == self._per_rank else None
        for unit, sums in self._sums.items():
            sums.begin(self.done % self._per_rank, refusal)
            if not unit.options.syncs:
                unit.set(syncs=True)
                self._unsynced.append(unit)
        self._open = True
        step.sum_in_backward(True, True)

    def backward_ends(self, step: Step) -> None:
        """Counts one of this rank's micro-batches; after the last one of a step all reductions are awaited.

        A backward counts if it adds to a parameter. Those for inputs alone leave all as it is.
        """
        if step.gradients_came:
            self.done = self.done % self._per_rank + 1
            self.backwards += 1
            if self.done == self._per_rank:
                step.ending.complete()

    def backward_ended(self, step: Step) -> None:
        """Hands over the sums of a complete step."""
        if step.gradients_came and self.done == self._per_rank:
            for unit, sums in self._sums.items():
                sums.finish_without(unit.segments)
        self._close()

    def _refusal(self) -> RuntimeError | None:
        """Returns the error of adding to gradients of a complete step, if they are still there."""
        grads = (to_local(param.grad) for param in self.params if param.grad is not None)
        return leftovers(self._per_rank) if any(bool(grad.any()) for grad in grads) else None

    def _close(self) -> None:
        """Gives back the user's settings of accumulation after a backward."""
        for unit in self._unsynced:
            unit.set(syncs=False)
        self._unsynced.clear()
        self._open = False

    def _drop(self) -> None:
        """Drops the sums of a step that will not end."""
        if self._open:
            self._close()
        self.done = 0
        for sums in self._sums.values():
            sums.drop()


def sharded_params(units: Iterable[Unit]) -> list[nn.Parameter]:
    """Returns the parameters of units, as optimizers see them."""
    return [*dict.fromkeys(param for unit in units for sharded in unit.params for param in sharded.sources)]


_living = weakref.WeakSet[CountedSteps]()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for steps in tuple(_living):
        steps.before_step(optimizer)


# Registered once: a hook that goes with its model could go while torch calls the hooks.
register_optimizer_step_pre_hook(_before_step)
