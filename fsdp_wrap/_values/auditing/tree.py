"""`TreeAudit`: draws steps of one tree of units, and meets the other ranks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, everywhere
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._params import Layout, held_params
from fsdp_wrap._runtime import Schedule, Unit
from fsdp_wrap._values.auditing.corruption import SHARD, UPDATE, Corruption, causes
from fsdp_wrap._values.auditing.places import Key, Sums, keyed
from fsdp_wrap._values.auditing.reductions import Reductions
from fsdp_wrap._values.auditing.shards import Shards
from fsdp_wrap._values.auditing.twice import Twice, can_be_twice
from fsdp_wrap._values.auditing.updates import RepeatedUpdate
from fsdp_wrap._values.council import Council, all_begin, all_here


class _Told(NamedTuple):
    """The evidence that each rank tells all others in a meeting."""

    looks: Mapping[Key, Sums]
    sent: Mapping[Key, Sums]
    done: Sequence[Key]
    differs: bool
    refused: str


class TreeAudit(PlugIn):
    """Audits drawn steps of one tree.

    Args:
        schedule: The tree's.
        units: Its units by name.
        every: Number of steps of which one is drawn.
        seed: The same on all ranks.
        report: Takes the findings of a meeting, the same on all ranks; may raise.
        skip: Takes what cannot be audited: the name of a unit, and why.

    Attributes:
        audited: Number of audited steps that have ended.
    """

    order = Precedence.VALUES

    def __init__(
        self,
        schedule: Schedule,
        units: Mapping[Unit, str],
        every: int,
        seed: int,
        report: Callable[[Sequence[Corruption]], None],
        skip: Callable[[str, str], None],
    ) -> None:
        self._schedule, self._units, self._every, self._seed = schedule, units, every, seed
        self._report, self._skip = report, skip
        self._rank = dist.get_rank()
        self._council = Council(schedule)
        self._number = self.audited = 0
        self._stepped = self._trains = self._begun = False
        self._leader: ref[torch.optim.Optimizer] | None = None
        self._others = WeakSet[torch.optim.Optimizer]()  # that have stepped since the leader has
        self._layouts: dict[Layout, tuple[Unit, Key]] = {}
        self._owners: dict[int, tuple[Unit, Key]] = {}
        self._twice, self._drawn = Twice(schedule.device), ""
        self._cannot: set[Unit] = set()
        self._forget()
        self._hook = register_optimizer_step_post_hook(self._on_step)
        self._armed = ExitStack()
        self._follow()

    def _forget(self) -> None:
        """Drops the evidence of a step."""
        self._shards = Shards(self._units, self._rank)
        self._reductions = Reductions(self._council.members, self._rank)
        self._updates = RepeatedUpdate()
        self._reported: set[tuple[str, int, str]] = set()
        self._updated: list[Corruption] = []
        self._twice.draw(None)
        self._begun = self._trains = False

    # steps

    def _random(self, *what: object) -> Random:
        return Random(" ".join(map(str, (self._seed, *what))))

    def _is_drawn(self) -> bool:
        window, place = divmod(self._number, self._every)
        return self._random("step", window).randrange(self._every) == place

    def _follow(self) -> None:
        """Looks on in a drawn step, and not at all in others."""
        drawn = self._is_drawn()
        if not drawn:
            self._armed.close()
        elif self not in everywhere.attached:
            everywhere.attach(self)
            self._armed.callback(everywhere.detach, self)
            self._armed.callback(register_optimizer_step_pre_hook(self._before_step).remove)

    def end_step(self) -> None:
        """Notes that parameters were updated."""
        if self in everywhere.attached:
            self._stepped = True
        else:
            self._number += 1
            self._follow()

    def _leads(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is the one by whose steps are counted: the first that has a parameter.

        Another one takes its place by a second step in which the leader takes none. Whether the leader still
        lives does not count: ranks collect garbage at different times.
        """
        if self._leader is not None and self._leader() is optimizer:
            self._others.clear()
            return True
        if not self._holds(optimizer):
            return False
        if self._leader is not None and optimizer not in self._others:
            self._others.add(optimizer)
            return False
        self._leader = ref(optimizer)
        self._others.clear()
        return True

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        held = {*map(id, held_params(optimizer))}
        layouts = (layout for unit in self._units for layout in unit.layouts)
        return any(id(param) in held for layout in layouts for param in layout.sharded_params)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._begun:
            draw = self._random("parameter", self._number)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
            # What takes a step on shards wraps the closure that was given, which may be None.
            with_closure = getattr(closure, "__wrapped__", closure) is not None
            self._updates.before(optimizer, self._owners, draw, with_closure)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._begun:
            found = self._updates.check(self._rank, self._number)
            self._updated += [] if found is None else [found]
        if self._leads(optimizer):
            if self._begun:
                self._shards.look()
            self.end_step()

    def close(self, meets: bool) -> None:
        """Ends the audit; `meets` tells to end a step that is open with all other ranks."""
        try:
            if meets and self._stepped and all_here(self._schedule):
                self._end_step()
        finally:
            self._armed.close()
            self._hook.remove()

    # seams

    # Whether ranks meet follows from steps of optimizers and from forwards that all ranks run, and from
    # nothing that one rank alone knows: inside `uneven` a rank may run no forward, or other backwards.

    def forward_opens(self, schedule: Any) -> None:
        if schedule is not self._schedule:
            return
        all_run = all_begin(schedule)
        if all_run and self._stepped:
            self._end_step()
            if self not in everywhere.attached:
                return
        self._trains = all_run and torch.is_grad_enabled()
        if self._trains:
            self._layouts = keyed(self._units)
            if not self._begun:
                self._begin_step()

    @property
    def _looks_on(self) -> bool:
        """Whether a value belongs to a forward that trains, of all ranks, or to a backward."""
        return self._begun and (self._trains or not self._schedule.depth) and all_here(self._schedule)

    def _begin_step(self) -> None:
        self._begun = True
        self._owners = {
            id(param): owner for layout, owner in self._layouts.items() for param in layout.sharded_params
        }
        self._shards.look()
        units = [unit for unit in self._units if unit not in self._cannot and can_be_twice(unit)]
        unit = self._random("unit", self._number).choice(units) if units else None
        self._drawn = "" if unit is None else self._units[unit]
        self._twice.draw(unit)

    def runs(self, unit: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if self._looks_on and graph_task() == -1 and current_transform() is None:
            self._twice.begin(unit, compute, args, kwargs)

    def sees(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        if not self._looks_on:
            return
        if owner in self._layouts:
            (reduced,) = values
            if reduced is not None:
                self._reductions.take(self._layouts[owner][1], reduced)
        elif owner in self._units and current_transform() is None:
            if seam is ValueSeam.PARAMETERS:
                self._shards.take(owner, graph_task() != -1)
            elif seam is ValueSeam.GRADIENTS:
                self._twice.take_gradients(owner, alone=len(self._council.members) == 1)
            elif seam is ValueSeam.OUTPUTS and graph_task() == -1:
                self._twice.take_outputs(owner, [each for each in values if each is not None])

    def sends(self, layout: Any, full: torch.Tensor) -> None:
        if self._looks_on and layout in self._layouts:
            self._reductions.send(*self._layouts[layout], full)

    def backward_ended(self, schedule: Any) -> None:
        if schedule is self._schedule and self._begun and all_here(schedule):
            self._meet()

    # meetings

    @torch.no_grad()
    def _meet(self) -> None:
        """Compares the evidence of a forward and backward with that of the other ranks."""
        step, looks = self._number, self._looks()
        differs = self._twice.differs()
        own = _Told(looks, self._shards.sent, self._reductions.done, differs, self._twice.refused)
        told = dict(zip(self._council.members, self._council.gather(own)))
        sent = {rank: each.sent for rank, each in told.items()}
        found = [*self._shards.check_replicas(step, SHARD, {rank: each.looks for rank, each in told.items()})]
        found += self._shards.check_gathered(step, sent)
        found += self._shards.check_kept(step)
        common = [key for key in own.done if all(key in each.done for each in told.values())]
        sums = self._reductions.collect(sorted(common))
        self._council.add(sums)
        found += self._reductions.check(step, sums)
        if any(each.differs for each in told.values()):
            found += self._judge(
                differs, alone=len(told) == 1 or not all(each.differs for each in told.values())
            )
        self._leave_out(next((each.refused for each in told.values() if each.refused), ""))
        self._twice.forget()
        self._conclude(found)

    def _looks(self) -> dict[Key, Sums]:
        return {key: look.sums for key, look in self._shards.looks.items()}

    def _judge(self, differs: bool, alone: bool) -> list[Corruption]:
        """Computes the drawn unit more often, on all ranks; returns what is wrong on this one.

        No hardware fails on all ranks at once: if none is `alone`, it is the program.
        """
        judged = self._twice.judge(self._rank, self._number, self._drawn)
        if not isinstance(judged, str) and not alone:
            judged = "all ranks differ: it is not deterministic, or other code uses its parameters or hooks"
        reasons = self._council.share(judged if differs and isinstance(judged, str) else None)
        self._leave_out(reasons[0] if reasons else "")
        return judged if differs and not isinstance(judged, str) else []

    def _leave_out(self, reason: str) -> None:
        """Draws a unit never again, if there is a reason."""
        if reason:
            self._cannot |= {unit for unit, name in self._units.items() if name == self._drawn}
            self._skip(self._drawn, reason)

    @torch.no_grad()
    def _end_step(self) -> None:
        """Compares the updates with those of the replicas, and goes on to the next step."""
        found, step = self._updated, self._number
        try:
            if self._begun:
                found += self._shards.check_kept(step)
                told = dict(zip(self._council.members, self._council.gather(self._looks())))
                found += self._shards.check_replicas(step, UPDATE, told)
                self.audited += 1
                self._conclude(found)
        finally:
            self._forget()
            self._stepped = False
            self._number += 1
            self._follow()

    def _conclude(self, own: Iterable[Corruption]) -> None:
        """Reports what all ranks have found, once a step."""
        shared = self._council.share([*own] or None)
        if not shared:
            return
        found = causes((one for of_rank in shared for one in of_rank), self._ranks_of)
        new = [each for each in found if self._is_new(each)]
        self._reported |= {(each.phase, each.rank, each.unit) for each in new}
        if new:
            self._report(new)

    def _is_new(self, found: Corruption) -> bool:
        """Whether a finding was not reported in this step; a wrong shard stays wrong in the update."""
        phases = {found.phase, SHARD} if found.phase == UPDATE else {found.phase}
        return not any((phase, found.rank, found.unit) in self._reported for phase in phases)

    def _ranks_of(self, name: str) -> frozenset[int]:
        unit = next(unit for unit, own in self._units.items() if own == name)
        return frozenset() if unit.handle is None else unit.handle.communicator.members
