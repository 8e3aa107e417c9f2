"""`StepChecks`: what the ranks of a tree compare of an optimizer's steps, at their next backward's end.

No collective is issued for it. A rank leaves a remark in the log of collectives of its host, with what it
has done to its parts. After the reductions of the next backward all ranks of the host have left theirs. The
number of steps is a part of the word of each collective, which ranks compare anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_wrap._checks.factors import ScaledParts
from fsdp_wrap._checks.plain import plain_params, tell_gradients
from fsdp_wrap._comm import GroupPositions
from fsdp_wrap._core import PlugIn, Precedence, before_steps
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import FlatPiece
from fsdp_wrap._runtime import Step, Unit, buffers_of, step_of

_FACTORS, _GRADIENTS, _SUBJECTS = 0, 1, 2
_LOOKS = 2  # times that a remark is compared, until all present ranks have made it


class Remark(Protocol):
    """Something that this rank has told the others, to be compared with what they tell."""

    @property
    def groups(self) -> Sequence[GroupPositions]:
        """The logs of the groups that it was told."""

    @property
    def text(self) -> bytes:
        """What was told."""

    def judge(self, texts: Mapping[int, bytes], members: Sequence[int]) -> str | None:
        """Returns the error that follows from what the ranks of a group have told, or None.

        Args:
            texts: By rank in the group.
            members: The global ranks of the group.
        """


class StepChecks(PlugIn):
    """The checks of one tree.

    Args:
        step: That of the tree.

    Attributes:
        parts: Samples of its gradients, once a backward has brought some.
    """

    order = Precedence.CHECKS

    def __init__(self, step: Step) -> None:
        self._step = weakref.ref(step)
        self._tree, self._units = step.tree, step.units
        self.parts: ScaledParts | None = None
        self._told: list[tuple[Remark, GroupPositions, tuple[int, int], int]] = []
        _all.add(self)
        _records.clear()

    def backward_opens(self, step: Any) -> None:
        """Notes that gradients will change."""
        if self.parts is not None:
            self.parts.forget()

    def backward_ended(self, step: Any) -> None:
        """Compares what ranks have told at the last step, and looks at the gradients for the next one.

        Raises a RuntimeError, on all ranks of the host, if they have made a mistake.
        """
        if not (step.ending.waits and step.shifts_alone):
            return
        if self._told:
            self._compare()
        if self.parts is None:
            self.parts = ScaledParts(self._units)
        self.parts.take()

    def _compare(self) -> None:
        told, self._told = self._told, []
        for what, positions, place, looks in told:
            texts = positions.remarks(*place)
            error = what.judge(texts, positions.members)
            if error is not None:
                self._told = []
                raise positions.told(error)
            if len(texts) < positions.present and looks > 1:
                self._told.append((what, positions, place, looks - 1))

    def _tell(self, subject: int, remark: Remark) -> None:
        """Leaves a remark for the other ranks, to be compared at the end of the next backward."""
        for positions in remark.groups:
            about = _SUBJECTS * self._tree.number_in(positions) + subject
            self._told.append((remark, positions, positions.remark(about, remark.text), _LOOKS))

    @property
    def edited(self) -> bool:
        """Whether gradients were edited since the end of the backward."""
        return self.parts is not None and self.parts.edited

    def tell_factors(self) -> None:
        """Tells the other ranks by which factors this one has scaled its parts of gradients."""
        told = None if self.parts is None else self.parts.tell()
        if told is not None:
            self._tell(_FACTORS, told)

    def tell_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells the other ranks of the gradients of plain parameters in an optimizer."""
        both = next((buffers.communicators for buffers in buffers_of(self._units)), ())
        logs = [communicator.positions for communicator in both if communicator.positions is not None]
        groups = [positions for positions in logs if positions.present > 1]  # else nobody could compare
        if groups and (params := plain_params(_beside_sharded(optimizer))):
            self._tell(_GRADIENTS, tell_gradients(optimizer, params, groups))

    @property
    def in_step(self) -> bool:
        """Whether ranks must take the same steps: nothing lets them part.

        A rank that had no batch in `uneven` has run no forward, and steps as the others do.
        """
        step = self._step()
        return step is not None and not step.plug_ins.align

    @property
    def collectives(self) -> int:
        """Number of collectives that this rank has issued in the tree's groups."""
        return self._tree.issued

    def take_step(self) -> None:
        """Counts a step of an optimizer with its parameters."""
        self._tree.take_step()

    def first_in(self, places: Mapping[int, int]) -> int | None:
        """Returns the first of the places, by id of a parameter, that its sharded parameters have."""
        return min((places[param] for param in self.sharded_ids if param in places), default=None)

    @property
    def sharded_ids(self) -> Iterator[int]:
        """The ids of its sharded parameters."""
        params = (sharded for unit in self._units for sharded in unit.params)
        return (id(param) for sharded in params for param in sharded.sharded_params)


_all: weakref.WeakSet[StepChecks] = weakref.WeakSet()


def _id_of(param: nn.Parameter) -> int:
    """Returns the id of the sharded parameter that an optimizer steps on, perhaps by a piece of it."""
    return id(param.flat if isinstance(param, FlatPiece) else param)


def _beside_sharded(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Returns an optimizer's parameters that are sharded parameters of no tree."""
    sharded = set(chain.from_iterable(checks.sharded_ids for checks in [*_all]))
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [param for param in params if _id_of(param) not in sharded]


@dataclass
class _Record:
    """What is known of an optimizer.

    Attributes:
        lists: Its lists of parameters, with their lengths, by id.
        trees: References to the checks of the trees whose parameters it has.
        steps: How often it has stepped after collectives of its trees.
        issued: How many of these there were before its last step.
    """

    lists: list[tuple[int, int]]
    trees: list[weakref.ref[StepChecks]]
    steps: int
    issued: int = -1


_records: WeakKeyDictionary[torch.optim.Optimizer, _Record] = WeakKeyDictionary()


def _record_of(optimizer: torch.optim.Optimizer) -> _Record:
    lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
    record = _records.get(optimizer)
    if record is None or record.lists != lists:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        places = {_id_of(param): place for place, param in enumerate(params)}
        firsts = ((checks.first_in(places), checks) for checks in [*_all])
        ordered = sorted(((n, checks) for n, checks in firsts if n is not None), key=lambda pair: pair[0])
        trees = [weakref.ref(checks) for _, checks in ordered]  # in the same order on all ranks
        _records[optimizer] = record = _Record(lists, trees, 0 if record is None else record.steps)
    return record


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    """Counts a step, and tells the other ranks how this one has changed gradients."""
    record = _record_of(optimizer)
    if not record.trees or graph_task() != -1:
        return
    trees = [checks for reference in record.trees if (checks := reference()) is not None and checks.in_step]
    issued = sum([checks.collectives for checks in trees])
    if issued == record.issued:  # the step of a base class, inside that of an optimizer
        return
    record.issued = issued
    record.steps += 1
    is_due, takes = record.steps & (record.steps - 1) == 0, not _skips(optimizer)  # due at 1, 2, 4, 8...
    told = False
    for checks in trees:
        if checks.edited and not told:
            checks.tell_factors()
            told = True
        if is_due:
            checks.tell_plain(optimizer)
            is_due = False
        if takes:
            checks.take_step()


def _skips(optimizer: Any) -> bool:
    """Whether the kernel will skip the step, since a gradient scaler has told it to."""
    found_inf: object = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and found_inf.device.type == "cpu" and bool(found_inf)


before_steps.append(_before_step)


@contextmanager
def scaling_gradients(units: Iterable[Unit]) -> Iterator[None]:
    """Scales gradients of units while the context is open, by a factor that all ranks have agreed on."""
    steps = dict.fromkeys(map(step_of, units))
    attached = chain.from_iterable(step.plug_ins.attached for step in steps)
    trees = [plug_in for plug_in in attached if isinstance(plug_in, StepChecks)]
    unedited = [checks.parts for checks in trees if checks.parts is not None and not checks.edited]
    yield
    for parts in unedited:
        parts.accept()
