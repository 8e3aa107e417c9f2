"""`uneven`: the context in which ranks may have different numbers of batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_wrap._comm import Note
from fsdp_wrap._core import Phase, check_flag, watching_steps
from fsdp_wrap._runtime import (
    Schedule,
    communicators_of,
    refuse_unsharded,
    require_root,
    schedule_of,
    units_in,
)
from fsdp_wrap._uneven.options import RoundOptions
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.planned import peers_over
from fsdp_wrap._uneven.pooling import Pool
from fsdp_wrap._uneven.rounds import Rounds


class Uneven:
    """What `uneven` returns: weighs backwards, and tells how much this rank has helped."""

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
            weight: What the micro-batch counts, such as its number of tokens; 1 by default.
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
    with its weight (`Uneven.backward`), as if one rank had run all of them. Gradients from before are added
    to. Under `no_sync` gradients wait for a backward outside of it, or for the end of the context. Units that
    are updated in the backward (`fsdp_wrap.optim.step_in_backward`) take the mean over the ranks that have a
    batch.

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
            already. At the end, on all ranks, if all weights are zero.
        RuntimeError: Inside a forward or backward, or while gradients of `no_sync` wait. On all ranks, if one
            leaves the context by an error: then all have the gradients from before.
    """
    check_flag("average", average)
    schedules = _schedules_of(models)
    peers = _peers_of(schedules)
    options = RoundOptions(schedules, average)
    rounds = Rounds(schedules, peers, options)
    rounds.enter()
    pool = Pool(schedules, average, peers.size)
    updates = any(unit.updater is not None for schedule in schedules for unit in schedule.units)
    with ExitStack() as undo:
        undo.callback(options.restore)
        undo.enter_context(watching_steps(rounds.leader))
        undo.callback(register_optimizer_step_pre_hook(_StepRefusal(pool.params)).remove)
        options.gather_wholes()
        for schedule in schedules:
            undo.callback(setattr, schedule, "joining", None)
            schedule.joining = rounds
        try:
            yield Uneven(rounds, updates)
            rounds.join()
            pool.complete(rounds.totals)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # a rank may have died
                rounds.fail(error)
            for schedule in schedules:
                with contextlib.suppress(RuntimeError):  # what is in flight may never end
                    schedule.reset()
            pool.drop()
            raise
    if rounds.shadowed:
        for schedule, order in zip(schedules, rounds.orders):
            schedule.follow(order)


class _StepRefusal:
    """Refuses steps of optimizers that hold some parameters."""

    def __init__(self, params: set[nn.Parameter]) -> None:
        self._params = params

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(param in self._params for group in optimizer.param_groups for param in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called inside uneven() on rank {dist.get_rank()}, "
                "before the other ranks' batches are in the gradients: step after the context"
            )


def _schedules_of(models: Sequence[nn.Module]) -> list[Schedule]:
    """Returns the schedules of models that are between two steps; refuses all others."""
    if not models:
        raise ValueError("uneven() needs a model: pass all models that compute inside")
    found: dict[Schedule, None] = {}
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"uneven() takes models, not a {type(model).__name__}")
        units = units_in(model)
        if not units:
            refuse_unsharded(model, "uneven()")
        require_root(next(iter(units.values())), "uneven()")
        found.update(dict.fromkeys(map(schedule_of, units.values())))
    for schedule in found:
        schedule.require_idle("uneven()")
        for unit in schedule.units:
            if unit.handle is not None and unit.handle.accumulates:
                raise RuntimeError(
                    f"gradients of {unit.name} that no_sync left on rank {dist.get_rank()} wait for a "
                    "backward: run it before uneven(), or accumulate inside"
                )
    return [*found]


_NOTE = Note("agrees on the ranks of a model")
_known: MutableMapping[Schedule, Peers] = WeakKeyDictionary()
"""By the schedule of the first model."""


def _peers_of(schedules: Sequence[Schedule]) -> Peers:
    """Returns the ranks that compute with some models; collective at first."""
    known = _known.get(schedules[0])
    if known is None or not known.lives:
        known = _known[schedules[0]] = peers_over(_members(schedules[0]))
    for schedule in schedules[1:]:
        if schedule not in _known:
            _known[schedule] = peers_over(_members(schedule))
        if _known[schedule].members != known.members:
            raise ValueError(
                f"{schedule.root.name} computes on ranks {_known[schedule].members}, and "
                f"{schedules[0].root.name} on ranks {known.members}: use one uneven() for each"
            )
    return known


def _members(schedule: Schedule) -> set[int]:
    """Returns the global ranks of a model: also those that this rank meets by way of others; collective."""
    handles = [unit.handle for unit in schedule.units if unit.handle is not None]
    communicators = dict.fromkeys(each for unit in schedule.units for each in communicators_of(unit))
    members = {dist.get_rank()}.union(*(each.members for each in communicators))
    parts = [part for handle in handles for layout in handle.layouts for part in layout.distributed or ()]
    members.update(*(part.mesh.mesh.flatten().tolist() for part in parts if part is not None))
    for each in communicators:
        if each.positions is not None and each.positions.agreement.compares:
            each.positions.issue(_NOTE, Phase.FORWARD, schedule.iteration)
            members.update(*each.all_gather_object(members))
    return members
