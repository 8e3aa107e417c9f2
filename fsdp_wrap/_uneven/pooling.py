"""`Pool`: gradients of some models as if one rank had run all backwards of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import await_reduction, summing
from fsdp_wrap._core import Phase
from fsdp_wrap._params import to_local
from fsdp_wrap._runtime import Step, Unit
from fsdp_wrap._uneven.models import Models, Totals
from fsdp_wrap._uneven.units import sharded_params


class Pool:
    """The gradients of some models inside a context, apart from those from before.

    Args:
        steps: The steps of the models.
        averages: Whether gradients are divided by the sum of the weights of all backwards.
        ranks: Number of ranks that compute with the models.
    """

    def __init__(self, steps: Sequence[Step], averages: bool, ranks: int) -> None:
        self._steps, self._averages, self._ranks = steps, averages, ranks
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._noted: dict[Unit, list[tuple[nn.Parameter, torch.Tensor, int]]] = {}

    def begin(self) -> None:
        """Sets the gradients from before aside."""
        for param in self.params:
            if param.grad is not None:
                self._before[param], param.grad = param.grad, None

    def note(self, step: Step) -> None:
        """Notes the gradients at the end of a backward, which other ranks have added to."""
        for unit in step.units:
            params = [] if step.plug_ins.updates(unit) else sharded_params([unit])
            grads = [(param, param.grad) for param in params if param.grad is not None]
            self._noted[unit] = [(param, grad, to_local(grad)._version) for param, grad in grads]

    def forget(self, step: Step) -> None:
        """Forgets what was noted, where reductions are still in flight."""
        for unit in step.units:
            self._noted.pop(unit, None)

    def check(self) -> None:
        """Raises a RuntimeError if gradients were written to, or dropped, since the last backward."""
        for unit, noted in self._noted.items():
            for param, grad, version in noted:
                if param.grad is not grad or to_local(grad)._version != version:
                    raise RuntimeError(
                        f"gradients of {unit.name} were written to or dropped (zero_grad(), clipping) inside "
                        f"uneven() on rank {dist.get_rank()}, and other ranks' batches are in them already: "
                        "do that after the context"
                    )

    @property
    def params(self) -> set[nn.Parameter]:
        """All sharded parameters."""
        return {param for step in self._steps for param in sharded_params(step.units)}

    def drop(self) -> None:
        """Restores the gradients from before."""
        for param in self.params:
            param.grad = self._before.get(param)

    @torch.no_grad()
    def complete(self, totals: Sequence[Totals], models: Models) -> None:
        """Reduces what is left, divides, and adds the gradients from before; collective.

        Raises a ValueError if there were backwards, and all of them had no weight, or if models that share a
        unit have other weights each.
        """
        for step, total in zip(self._steps, totals):
            if self._averages and total.backwards and not total.weights:
                raise ValueError(
                    f"the weights of all {int(total.backwards)} backwards of {step.root.name} inside "
                    "uneven() are zero, so they have no mean: leave out such batches"
                )
        units = [unit for step in self._steps for unit in step.units if self._averages]
        weights = {unit: models.weights_of(unit, totals) for unit in units}
        for step, total in zip(self._steps, totals):
            if total.owing:
                self._reduce(step)
            if self._averages:
                self._divide(step, weights)
        for param, grad in self._before.items():
            param.grad = grad if param.grad is None else param.grad.add_(grad)

    def _reduce(self, step: Step) -> None:
        with summing(step, True, True):
            for unit in step.units:
                buffers = unit.buffers
                if buffers.gradients.reduced_segments():
                    buffers.gradients.forget_zeroed()
                    step.queue.reduce_alone(unit, Phase.IDLE)
                    step.queue.finish_reduction_of(unit)
            await_reduction(step)

    def _divide(self, step: Step, weights: Mapping[Unit, float]) -> None:
        """Divides sums of gradients by the weights of all backwards, in place of the number of ranks."""
        units = [unit for unit in step.units if unit.params and not step.plug_ins.updates(unit)]
        data_ranks = max((_data_ranks(unit) for unit in units), default=1)
        part = data_ranks / self._ranks  # the ranks of a tensor-parallel group share their batches
        for unit in units:
            divisor = weights[unit] * part / _divisor(unit)
            for param in sharded_params([unit]) if divisor not in (0.0, 1.0) else ():
                if param.grad is not None:
                    to_local(param.grad).div_(divisor)


def _data_ranks(unit: Unit) -> int:
    return unit.buffers.communicator.size * unit.buffers.replicas.size


def _divisor(unit: Unit) -> float:
    """Returns by what the sums of a unit's gradients over all ranks are divided."""
    # Communication hooks average by themselves, over the replicas of NO_SHARD too.
    gradients = unit.buffers.gradients
    return _data_ranks(unit) if gradients.has_own_reduction else gradients.contributors
