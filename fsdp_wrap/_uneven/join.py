"""`torch.distributed.algorithms.Join` for the wrapper: rounds of one forward, its backward and a step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_wrap._by_hand import follow, joins
from fsdp_wrap._core import Computing, everywhere
from fsdp_wrap._params import held_params
from fsdp_wrap._runtime import Step, step_of, units_in
from fsdp_wrap._uneven.context import steps_of
from fsdp_wrap._uneven.fates import GradientFates, follow_fates
from fsdp_wrap._uneven.members import peers_of
from fsdp_wrap._uneven.options import RoundOptions
from fsdp_wrap._uneven.orders import Leader
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.rounds import AGREES, Rounds
from fsdp_wrap._uneven.units import sharded_params


class _Steps:
    """The steps of the optimizers of a model, which joined ranks take after the others.

    Args:
        params: The sharded parameters of the model.
        known: Optimizers of the model, in the order of all ranks; others follow when they step first.
    """

    def __init__(self, params: set[nn.Parameter], known: Sequence[Optimizer]) -> None:
        self._params, self._known = params, [*known]
        self._taken: list[tuple[int, list[dict[str, Any]]]] = []
        self.watching = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._known:
            if self._params.isdisjoint(held_params(optimizer)):
                return
            self._known.append(optimizer)
        self._taken.append((self._known.index(optimizer), _settings_of(optimizer)))

    def follow(self, peers: Peers, iteration: int) -> None:
        """Takes the optimizer steps that other ranks took and this one has not; collective."""
        counts = [int(row[0]) for row in peers.agree(AGREES, [len(self._taken)], iteration).values()]
        least, own = min(counts), len(self._taken)
        if least == max(counts):
            return
        every = peers.share((len(self._known), self._taken[least:]))
        longest = max((taken for _, taken in every.values()), key=len)
        for rank, (known, _) in every.items():
            if any(index >= known for index, _ in longest):
                raise RuntimeError(
                    f"an optimizer steps inside Join that rank {rank}, which has no batch left, has not used "
                    "there: pass it on all ranks, as Join([model], optimizer=optimizer)"
                )
        for index, settings in longest[own - least :]:
            for group, values in zip(self._known[index].param_groups, settings):
                group.update(values)
            self._known[index].step()


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the numbers of each group: schedulers of joined ranks do not step."""
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float | tuple)}
        for group in optimizer.param_groups
    ]


class _JoinLeader(Leader):
    """Ends a round with a forward that no backward is likely to follow.

    Attributes:
        between: Whether no round runs, on ranks that have a batch.
    """

    between = True

    def begin_round(self, told: Sequence[int]) -> None:
        super().begin_round(told)
        self.between = False

    def end_round(self) -> None:
        super().end_round()
        self.between = True

    def computed(self, unit: Any, what: Computing) -> None:
        if what is Computing.FORWARD and unit in self._places and not unit.nested:
            trains = any(param.requires_grad for param in unit.module.parameters())
            if not (trains and torch.is_grad_enabled()):
                self.end_round()


class _JoinRounds(Rounds):
    """Rounds that torch's `Join` begins."""

    make_leader = _JoinLeader
    leader: _JoinLeader

    def __init__(self, model: Any, step: Step, options: RoundOptions, known: Sequence[Optimizer]) -> None:
        self.peers = peers_of([step])
        super().__init__([step], self.peers, options)
        self._model = weakref.ref(model)
        self._step = step
        params = sharded_params(step.units)
        self._gradients = GradientFates(params)
        self.steps = _Steps({*params}, known)
        self._watching = register_optimizer_step_pre_hook(self._before_step)
        step.plug_ins.attach(self)
        everywhere.attach(self.leader)

    @property
    def separates(self) -> bool:
        return self.shadowed

    def forward_begins(self, step: Step) -> None:
        model = self._model()
        if model is None or not model._join_config.enable:
            return
        self.leader.end_round()
        try:
            notified = Join.notify_join_context(model)
        except RuntimeError:  # throw_on_early_termination
            self.end()
            raise
        if notified is not None:
            notified.wait()
        super().forward_begins(step)

    def backward_begins(self, step: Step) -> None:
        if self.leader.between:  # a further backward of one forward: joined ranks wait for another round
            self.forward_begins(step)
        if self.leader.told:
            self.leader.tell_fates(0, self._gradients.fates())
        super().backward_begins(step)

    def backward_ended(self, step: Step) -> None:
        super().backward_ended(step)
        self._gradients.note(step.ending.waits, norms=self.shadowed)
        self.leader.end_round()

    def _begin_round(self, rows: Mapping[int, Sequence[float]]) -> list[Sequence[float]]:
        active = super()._begin_round(rows)
        if self.shadowed:
            self.steps.follow(self.peers, self._step.iteration)
        return active

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuses a step with gradients that were written to on this rank and not on joined ranks."""
        if not self.shadowed or self._rank not in self._active:
            return
        held = held_params(optimizer)
        for unit in self._step.units:
            params = held.intersection(sharded_params([unit]))
            if any(map(self._gradients.was_written, params)):
                raise RuntimeError(
                    f"gradients of {unit.name} were written to (clipping, a scaler) before "
                    f"{type(optimizer).__name__}.step() inside Join on rank {self._rank}, and those of ranks "
                    "without a batch were not: use uneven(), and clip and step after it"
                )

    @property
    def _attached(self) -> bool:
        return self in self._step.plug_ins.attached

    def _follow_last_fates(self) -> None:
        """Drops or zeroes this rank's gradients as the ranks with the last batch did."""
        rows = self.peers.agree(AGREES, self._gradients.fates(), self._step.iteration)
        if self._rank not in self._active:
            fates = [min(map(int, fates)) for fates in zip(*(rows[rank] for rank in self._active))]
            follow_fates(sharded_params(self._step.units), fates)

    def finish(self) -> None:
        """Ends the context on all ranks, which have joined."""
        if self.shadowed and self._attached:
            self.steps.follow(self.peers, self._step.iteration)
            self._follow_last_fates()
            follow(self._step, *self.orders)
        self.end()

    def end(self) -> None:
        """Ends the context on this rank."""
        if self._attached:
            self._step.plug_ins.detach(self)
            everywhere.detach(self.leader)
            self.steps.watching.remove()
            self._watching.remove()
            self._options.restore()


class _Hook(JoinHook):
    """Shadows a round of the ranks that have a batch."""

    def __init__(self, rounds: _JoinRounds) -> None:
        self._rounds = rounds
        weakref.finalize(self, rounds.end)  # also if the context ends by an error

    def main_hook(self) -> None:
        self._rounds.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._rounds.finish()


@joins.fill
class Joins:
    """The part of `torch.distributed.algorithms.Joinable` that communicates, for a wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks that compute with the model, which sends from host memory."""
        return peers_of([step_of(next(iter(units_in(self._model).values())))]).group

    def hook(
        self,
        divide_by_initial_world_size: bool = True,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        **_: Any,
    ) -> JoinHook:
        """Returns the hook of the model, a root; collective.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of all ranks, not of
                those that still have a batch.
            optimizer: The optimizers of the model, which a rank without any batch has to know.
            _: For other joinables.

        Raises:
            ValueError: If the model has units that run with another model.
        """
        step, *others = steps_of([self._model], "Join")
        for unit in units_in(self._model).values():
            if unit.step in others:
                raise ValueError(
                    f"{unit.name} is part of {step.root.name} and of another model on rank "
                    f"{dist.get_rank()}, so backwards of both end in it: Join takes models of their own, use "
                    "uneven() with both"
                )
        options = RoundOptions([step], () if divide_by_initial_world_size else step.units)
        options.gather_wholes()
        known = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        return _Hook(_JoinRounds(self._model, step, options, known))
