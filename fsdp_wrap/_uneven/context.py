"""`uneven`: the context in which ranks may have different numbers of batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_wrap._by_hand import follow, require_idle
from fsdp_wrap._checks import refuse_unsharded, require_root
from fsdp_wrap._core import check_flag, everywhere
from fsdp_wrap._params import held_params
from fsdp_wrap._runtime import Step, step_of, units_in
from fsdp_wrap._uneven.members import peers_of
from fsdp_wrap._uneven.options import RoundOptions
from fsdp_wrap._uneven.pooling import Pool
from fsdp_wrap._uneven.rounds import LeftByError, Rounds
from fsdp_wrap._uneven.units import sharded_params


class Uneven:
    """Weighs backwards inside `uneven`, and tells how much this rank has helped."""

    def __init__(self, rounds: Rounds, updates: bool) -> None:
        self._rounds, self._updates = rounds, updates

    @property
    def passes_helped(self) -> int:
        """Number of outermost forwards of other ranks that this rank took part in, without a batch."""
        return self._rounds.shadows

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Runs `loss.backward()`, with a weight in the mean over all backwards of all ranks.

        Args:
            loss: The mean over a micro-batch: a scalar, scaled by a `GradScaler` if there is one.
            weight: Weight of the micro-batch, such as its number of tokens; 1 by default.
            kwargs: Further arguments of `Tensor.backward`.

        Raises:
            ValueError: If the weight is negative or not finite, or if units are updated in the backward.
        """
        if weight is None:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        number = float(weight)
        if not 0 <= number < math.inf:
            raise ValueError(f"the weight of a backward must be finite and not negative, but is {number}")
        if self._updates:
            raise ValueError(
                "units are updated in the backward (step_in_backward), before the sum of all weights is "
                "known: leave out weight="
            )
        self._rounds.weight = number
        try:
            (loss * number).backward(**kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._rounds.weight = 1.0


@contextmanager
def uneven(*models: nn.Module, average: bool = True) -> Iterator[Uneven]:
    """Lets each rank run as many forwards and backwards as it has batches, also none.

    A rank that leaves the context waits for the others. Until all have left, it takes part in their
    collectives: it gathers its shards for them and reduces zeros. It computes nothing, and holds two units at
    most. Each outermost forward inside begins with one small agreement of all ranks.

    Afterwards the gradients are those of the pooled batch: the mean over all backwards of all ranks, each
    with its weight (`Uneven.backward`), as if one rank had run all of them. A backward counts if it adds to a
    parameter: `torch.autograd.grad` for inputs does not. Gradients from before are added to. Under `no_sync`
    gradients wait for a backward outside of it, or for the end of the context. Units that are updated in the
    backward (`fsdp_wrap.optim.step_in_backward`) take the mean over the ranks that have a batch.

    Optimizers step, and gradients are clipped, after the context.

    Args:
        models: All models, wrapped or sharded by `fully_shard`, that compute inside. All ranks must pass the
            same, and must run them in the same order as long as they have batches.
        average: Whether to take the mean over all backwards. If False, the gradients of all ranks are summed
            and divided by the number of ranks, as without this context: for losses that have been divided by
            the number of all tokens.

    Returns:
        A context that gives an `Uneven`. Collective at its beginning and its end.

    Raises:
        TypeError: If a model is no module.
        ValueError: If no model is given, nothing in one is wrapped or sharded, or one is in such a context
            already. At the end, on all ranks, if all weights are zero, or if models share a unit and have
            other sums of weights each.
        RuntimeError: Inside a forward or backward, or while gradients of `no_sync` wait. On all ranks, if one
            leaves the context by an error: then all have the gradients from before.
    """
    check_flag("average", average)
    steps = steps_of(models, "uneven()")
    peers = peers_of(steps)
    updated = [unit for step in steps for unit in step.units if step.plug_ins.updates(unit)]
    options = RoundOptions(steps, updated if average else ())  # their gradients do not outlive a backward
    pool = Pool(steps, average, peers.size)
    rounds = Rounds(steps, peers, options, pool)
    rounds.enter()
    pool.begin()
    with ExitStack() as undo:
        undo.callback(options.restore)
        undo.enter_context(everywhere.having(rounds.leader))
        refusal = _StepRefusal(pool.params.difference(sharded_params(updated)))
        undo.callback(register_optimizer_step_pre_hook(refusal).remove)
        options.gather_wholes()
        for step in steps:
            undo.enter_context(step.plug_ins.having(rounds))
        try:
            yield Uneven(rounds, bool(updated))
            rounds.join()
            pool.complete(rounds.totals, rounds.models)
        except BaseException as error:
            try:
                rounds.fail(error)
            except LeftByError:
                raise
            except RuntimeError:  # a rank has died
                raise error from None
            finally:
                pool.drop()
            raise
    if rounds.shadowed:
        for step, order in zip(steps, rounds.orders):
            follow(step, order)


class _StepRefusal:
    """Refuses steps of optimizers that hold some parameters."""

    def __init__(self, params: set[nn.Parameter]) -> None:
        self._params = params

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._params.isdisjoint(held_params(optimizer)):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called inside uneven() on rank {dist.get_rank()}, "
                "before the other ranks' batches are in the gradients: step after the context"
            )


def steps_of(models: Sequence[nn.Module], doing: str) -> list[Step]:
    """Returns the `Step` of each model; refuses models inside a forward or backward."""
    if not models:
        raise ValueError(f"{doing} needs a model: pass all models that compute inside")
    steps: dict[Step, None] = {}
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"{doing} takes models, not a {type(model).__name__}")
        units = units_in(model)
        if not units:
            refuse_unsharded(model, doing)
        require_root(next(iter(units.values())), doing)
        steps.update(dict.fromkeys(map(step_of, units.values())))
    for step in steps:
        require_idle([step.root], doing)
        for unit in step.units:
            if unit.plug_ins.takes:
                raise RuntimeError(
                    f"{unit.name} is reproducible, and {doing} lets ranks have different numbers of "
                    "micro-batches: call Reproducible.remove() first"
                )
            if unit.buffers.gradients.accumulated:
                raise RuntimeError(
                    f"gradients of {unit.name} that no_sync left on rank {dist.get_rank()} wait for a "
                    f"backward: run it before {doing}, or accumulate inside"
                )
    return [*steps]
