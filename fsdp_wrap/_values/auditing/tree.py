"""`TreeAudit`: draws steps of one tree of units, and meets the other ranks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from fsdp_wrap._params import ShardedParams
from fsdp_wrap._runtime import Step, Unit
from fsdp_wrap._values import files
from fsdp_wrap._values.auditing.corruption import SHARD, UPDATE, Corruption, causes
from fsdp_wrap._values.auditing.parts import AuditedSegment, Key, Sums, parts_of
from fsdp_wrap._values.auditing.reductions import Reductions
from fsdp_wrap._values.auditing.shards import Shards
from fsdp_wrap._values.auditing.twice import Twice, can_be_twice
from fsdp_wrap._values.auditing.updates import RepeatedUpdate
from fsdp_wrap._values.council import Council, all_begin, all_here
from fsdp_wrap._values.pieces import Piece
from fsdp_wrap._values.recorder import Reader, UnitRecorder

_NOT_STEADY = "all ranks differ: it is not deterministic, or other code uses its parameters or hooks"


class _Told(NamedTuple):
    """The evidence that each rank tells all others in a meeting."""

    looks: Mapping[Key, Sums]
    sent: Mapping[Key, Sums]
    done: Sequence[Key]
    differs: bool


class TreeAudit(Reader):
    """Audits drawn steps of one tree.

    Args:
        step: The tree's.
        units: Its units by name.
        every: Number of steps of which one is drawn.
        seed: The same on all ranks.
        report: Takes the findings of a meeting, the same on all ranks; may raise.
        skip: Takes what cannot be audited: the name of a unit, and why.

    Attributes:
        audited: Number of audited steps that have ended.
    """

    def __init__(
        self,
        step: Step,
        units: Mapping[Unit, str],
        every: int,
        seed: int,
        report: Callable[[Sequence[Corruption]], None],
        skip: Callable[[str, str], None],
    ) -> None:
        self._step, self._every, self._seed = step, every, seed
        self._report, self._skip = report, skip
        self._rank = dist.get_rank()
        self._council = Council(step)
        self._number = self.audited = 0
        self._stepped = self._trains = self._begun = False
        self._leader: ref[torch.optim.Optimizer] | None = None
        self._others = WeakSet[torch.optim.Optimizer]()  # that have stepped since the leader has
        self._parts: dict[ShardedParams, AuditedSegment] = {}
        self._owners: dict[int, AuditedSegment] = {}
        self._twice, self._drawn = Twice(step.device), ""
        self._cannot: set[str] = set()
        self._recorder = UnitRecorder(units, self)
        self._units = self._recorder.by_name
        self._forget()
        self._recorder.follow()
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
        """Opens the recorder in a drawn step, and closes it in any other."""
        if not self._is_drawn():
            self._recorder.close()
        elif not self._recorder.is_open:
            self._recorder.open()

    def end_step(self) -> None:
        """Notes that parameters were updated."""
        if self._recorder.is_open:
            self._stepped = True
        else:
            self._number += 1
            self._follow()

    def _leads(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether steps are counted by this optimizer: the first one that has a parameter of the model.

        Another one takes its place by a second step in which the leader takes none. Whether the leader still
        lives does not count: ranks collect garbage at different times.
        """
        if self._leader is not None and self._leader() is optimizer:
            self._others.clear()
            return True
        if not self._recorder.holds(optimizer):
            return False
        if self._leader is not None and optimizer not in self._others:
            self._others.add(optimizer)
            return False
        self._leader = ref(optimizer)
        self._others.clear()
        return True

    def before_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        if self._begun:
            draw = self._random("parameter", self._number)
            # What takes a step on shards wraps the closure that was given, which may be None.
            with_closure = getattr(closure, "__wrapped__", closure) is not None
            self._updates.before(optimizer, self._owners, draw, with_closure)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._begun:
            corruption = self._updates.check(self._rank, self._number)
            self._updated += [] if corruption is None else [corruption]
        if self._leads(optimizer):
            if self._begun:
                self._shards.look()
            self.end_step()

    def close(self, meets: bool) -> None:
        """Ends the audit; `meets` tells to end a step that is open with all other ranks."""
        try:
            if meets and self._stepped and all_here(self._step):
                self._end_step()
        finally:
            self._recorder.leave()

    # seams

    # Whether ranks meet follows from steps of optimizers and from forwards that all ranks run, and from
    # nothing that one rank alone knows: inside `uneven` a rank may run no forward, or other backwards.

    def begin(self, step: Step | None) -> None:
        all_run = all_begin(self._step)
        if all_run and self._stepped:
            self._end_step()
            if not self._recorder.is_open:
                return
        self._trains = all_run and torch.is_grad_enabled()
        if self._trains:
            self._parts = parts_of(self._units)
            if not self._begun:
                self._begin_step()

    @property
    def _looks_on(self) -> bool:
        """Whether to audit a value: of a backward, or of a forward that trains, if all ranks take part."""
        return self._begun and (self._trains or not self._step.depth) and all_here(self._step)

    def _begin_step(self) -> None:
        self._begun = True
        self._owners = {
            id(param): part for sharded, part in self._parts.items() for param in sharded.sharded_params
        }
        self._shards.look()
        names = [
            name for name, unit in self._units.items() if name not in self._cannot and can_be_twice(unit)
        ]
        self._drawn = self._random("unit", self._number).choice(names) if names else ""
        self._twice.draw(self._units[self._drawn] if names else None)

    def computes(self, unit: Unit, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if self._looks_on:
            self._twice.begin(unit, compute, args, kwargs)

    def see(self, seam: str, unit: str, pieces: Iterable[Piece]) -> None:
        if not self._looks_on:
            return
        if seam in (files.PARAMETER, files.AGAIN):
            self._shards.take(unit, "forward" if seam == files.PARAMETER else "backward")
        elif seam == files.GRADIENT:
            self._twice.take_gradients(self._units[unit], alone=len(self._council.members) == 1)
        elif seam == files.OUTPUT:
            self._twice.take_outputs(self._units[unit], [piece.data for piece in pieces])

    def reduced(
        self, unit: str, sharded: ShardedParams, shard: torch.Tensor, pieces: Iterable[Piece]
    ) -> None:
        if self._looks_on and sharded in self._parts:
            self._reductions.take(self._parts[sharded], shard)

    def sends(self, sharded: ShardedParams, full: torch.Tensor) -> None:
        if self._looks_on and sharded in self._parts:
            self._reductions.send(self._parts[sharded], full)

    def dropped(self) -> None:
        self._reductions.drop()

    def end(self, step: Step) -> None:
        if self._begun and all_here(step):
            self._meet()

    # meetings

    @torch.no_grad()
    def _meet(self) -> None:
        """Compares the evidence of a forward and backward with that of the other ranks."""
        step, shards = self._number, self._shards
        own = _Told(shards.looks, shards.sent, self._reductions.done, self._twice.differs())
        told = dict(zip(self._council.members, self._council.gather(own)))
        corruptions = [
            *shards.check_replicas(step, SHARD, {rank: evidence.looks for rank, evidence in told.items()})
        ]
        corruptions += shards.check_gathered(step, {rank: evidence.sent for rank, evidence in told.items()})
        corruptions += shards.check_kept(step)
        common = [key for key in own.done if all(key in evidence.done for evidence in told.values())]
        sums = self._reductions.collect(sorted(common))
        self._council.add(sums)
        corruptions += self._reductions.check(step, sums)
        differing, judged = sum(evidence.differs for evidence in told.values()), list[Corruption]()
        if differing:
            judged = self._twice.judge(self._rank, step, self._drawn)
        refused = self._twice.refused
        if judged and differing == len(told) > 1:  # no hardware fails on all ranks at once
            refused, judged = _NOT_STEADY, []
        self._conclude(corruptions + judged, refused)
        self._twice.forget()

    @torch.no_grad()
    def _end_step(self) -> None:
        """Compares the updates with those of the replicas, and goes on to the next step."""
        corruptions, step = self._updated, self._number
        try:
            if self._begun:
                corruptions += self._shards.check_kept(step)
                told = dict(zip(self._council.members, self._council.gather(self._shards.looks)))
                corruptions += self._shards.check_replicas(step, UPDATE, told)
                self.audited += 1
                self._conclude(corruptions)
        finally:
            self._forget()
            self._stepped = False
            self._number += 1
            self._follow()

    def _conclude(self, own: Sequence[Corruption], refused: str = "") -> None:
        """Reports all ranks' findings once per step; never draws again a unit that a rank has refused."""
        shared = self._council.share((own, refused) if own or refused else None)
        reasons = [reason for _, reason in shared if reason]
        if reasons:
            self._cannot.add(self._drawn)
            self._skip(self._drawn, reasons[0])
        corruptions = causes((one for of_rank, _ in shared for one in of_rank), self._ranks_of)
        new = [corruption for corruption in corruptions if self._is_new(corruption)]
        self._reported |= {(corruption.phase, corruption.rank, corruption.unit) for corruption in new}
        if new:
            self._report(new)

    def _is_new(self, corruption: Corruption) -> bool:
        """Whether a finding was not reported in this step; a wrong shard stays wrong in the update."""
        phases = {corruption.phase, SHARD} if corruption.phase == UPDATE else {corruption.phase}
        return not any((phase, corruption.rank, corruption.unit) in self._reported for phase in phases)

    def _ranks_of(self, name: str) -> frozenset[int]:
        return self._units[name].buffers.communicator.members
