"""`StepChecks`: what the ranks of a tree compare of an optimizer's steps, at their next backward's end.

No collective is issued for it. A rank leaves a remark in the log of collectives of its host, with what it
has done to its parts. After the reductions of the next backward all ranks of the host have left theirs. The
number of steps is a part of the word of each collective, which ranks compare anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from fsdp_wrap._comm import GroupPositions, Tree
from fsdp_wrap._core import after_steps, before_steps
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import FlatPiece
from fsdp_wrap._runtime.step_checks.factors import ScaledParts
from fsdp_wrap._runtime.step_checks.plain import plain_params, tell_gradients
from fsdp_wrap._runtime.unit import StepState, Unit

_FACTORS, _GRADIENTS, _SUBJECTS = 0, 1, 2
_LOOKS = 2  # times that a remark is compared, until all present ranks have made it


class Told(Protocol):
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


class StepChecks:
    """The checks of one tree.

    Args:
        state: The state of its step.
        tree: Its identity in logs.
        units: Its units.
    """

    def __init__(self, state: StepState, tree: Tree, units: Sequence[Unit]) -> None:
        self._state = weakref.ref(state)
        self._tree, self._units = tree, units
        self._parts: ScaledParts | None = None
        self._told: list[tuple[Told, GroupPositions, tuple[int, int], int]] = []
        _all.add(self)
        _records.clear()

    def begin_backward(self) -> None:
        """Notes that gradients will change."""
        if self._parts is not None:
            self._parts.forget()

    def end_backward(self) -> None:
        """Compares what ranks have told at the last step, and looks at the gradients for the next one.

        Raises a RuntimeError, on all ranks of the host, if they have made a mistake.
        """
        if self._told:
            self._compare()
        if self._parts is None:
            self._parts = ScaledParts(self._units)
        self._parts.take()

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

    def tell(self, subject: int, told: Told) -> None:
        """Leaves a remark for the other ranks, to be compared at the end of the next backward."""
        for positions in told.groups:
            about = _SUBJECTS * self._tree.number_in(positions) + subject
            self._told.append((told, positions, positions.remark(about, told.text), _LOOKS))

    @property
    def parts(self) -> ScaledParts | None:
        """The samples of its gradients, where a backward has brought some."""
        return self._parts

    @property
    def runs(self) -> bool:
        """Whether ranks must take the same steps: forwards have run, and nothing lets ranks part."""
        state = self._state()
        return state is not None and state.iteration > 0 and state.joining is None

    @property
    def groups(self) -> list[GroupPositions]:
        """The logs of the groups of its first unit: of one copy, and of the replicas."""
        handle = next((unit.handle for unit in self._units if unit.handle is not None), None)
        both = () if handle is None else (handle.communicator, handle.replicas)
        return [each.positions for each in both if each.size > 1 and each.positions is not None]

    def take_step(self) -> None:
        """Counts a step of an optimizer with its parameters."""
        self._tree.take_step()

    def first_in(self, places: Mapping[int, int]) -> int | None:
        """Returns the first of the places, by id of a parameter, that its sharded parameters have."""
        layouts = (layout for unit in self._units for layout in unit.layouts)
        ids = (id(param) for layout in layouts for param in layout.sharded_params)
        return min((places[param] for param in ids if param in places), default=None)


_all: weakref.WeakSet[StepChecks] = weakref.WeakSet()


class _Record:
    """What is known of an optimizer: the trees whose parameters it has, and how often it has stepped."""

    def __init__(self, lists: list[tuple[int, int]], checks: list[StepChecks], steps: int) -> None:
        self.lists, self.steps = lists, steps
        self._checks = [*map(weakref.ref, checks)]

    def checks(self) -> list[StepChecks]:
        """Returns the checks of its trees in which ranks must take the same steps; none inside a backward."""
        there = [reference() for reference in self._checks]
        return [each for each in there if each is not None and each.runs] if graph_task() == -1 else []


_records: WeakKeyDictionary[torch.optim.Optimizer, _Record] = WeakKeyDictionary()


def _record_of(optimizer: torch.optim.Optimizer) -> _Record:
    lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
    record = _records.get(optimizer)
    if record is None or record.lists != lists:
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        places = {id(each.flat if isinstance(each, FlatPiece) else each): n for n, each in enumerate(params)}
        firsts = ((each.first_in(places), each) for each in [*_all])
        ordered = sorted(((n, each) for n, each in firsts if n is not None), key=lambda pair: pair[0])
        checks = [each for _, each in ordered]  # in the same order on all ranks
        _records[optimizer] = record = _Record(lists, checks, 0 if record is None else record.steps)
    return record


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    """Tells the other ranks how this one has changed gradients, and what those of plain parameters are."""
    record = _record_of(optimizer)
    record.steps += 1
    every = record.checks()
    for checks in every:
        if checks.parts is not None and checks.parts.edited and (told := checks.parts.tell()) is not None:
            checks.tell(_FACTORS, told)
            break
    if every and record.steps & (record.steps - 1) == 0:  # 1, 2, 4, 8...
        groups, params = every[0].groups, plain_params(optimizer)
        if groups and params:
            every[0].tell(_GRADIENTS, tell_gradients(optimizer, params, groups))


def _after_step(optimizer: torch.optim.Optimizer) -> None:
    """Counts a step, unless its kernel has skipped it for the sake of a gradient scaler."""
    if not _has_skipped(optimizer):
        for checks in _record_of(optimizer).checks():
            checks.take_step()


def _has_skipped(optimizer: Any) -> bool:
    found: object = getattr(optimizer, "found_inf", None)  # set by gradient scalers for fused kernels
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found)


before_steps.append(_before_step)
after_steps.append(_after_step)
