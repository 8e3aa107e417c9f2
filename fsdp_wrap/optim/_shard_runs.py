"""`ShardRun`: several `DTensor`s whose shards lie one after the other, updated as one plain tensor.

`ShardRuns` are all runs of an optimizer, whose changes from step to step are looked for at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import is_owned
from fsdp_wrap._core.torch_private import DisableTorchFunctionSubclass, foreach_copy_
from fsdp_wrap._params import copyable, holding, memory_around

_PADDING = 16
"""Units begin each shard at a multiple of so many bytes; what is between is nobody's."""

_ALIKE = (torch.float32, torch.float64)
"""Kernels of other dtypes, and fused ones, may round an element otherwise at the end of a tensor."""

_VERSION, _DATA_PTR = operator.attrgetter("_version"), torch.Tensor.data_ptr
_GRAD, _SPEC = operator.attrgetter("grad"), operator.attrgetter("_spec")
_LOCAL, _GRAD_LOCAL = operator.attrgetter("_local_tensor"), operator.attrgetter("grad._local_tensor")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")

State = dict[str, Any]


class ShardRun:
    """`DTensor`s of one group of an optimizer, whose shards lie one after the other.

    The optimizer's state of the run is of the size of them all; in public each `DTensor` has its own view.
    Numbers, such as counts of steps, are equal for all, and each has its own.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = params
        locals_ = [param._local_tensor for param in params]
        self._shapes = [local.shape for local in locals_]
        first, sizes = locals_[0], [local.numel() for local in locals_]
        begin, size = first.data_ptr(), first.element_size()
        self.offsets = [(local.data_ptr() - begin) // size for local in locals_]
        self._bounds = [*zip(self.offsets, map(operator.add, self.offsets, sizes))]
        self.numel = self._bounds[-1][1]
        memory = torch.as_strided(first.detach(), (self.numel,), (1,))
        self.shard = nn.Parameter(memory, requires_grad=params[0].requires_grad)
        if self.shard.requires_grad:
            self.shard.grad_dtype = params[0].grad_dtype
        self.state: State = {}
        self.numbers: dict[str, torch.Tensor] = {}  # of the state, by name: those of all `DTensor`s

    def joint_gradient(self) -> torch.Tensor | None:
        """Returns the memory in which the gradients lie as the shards do; None if they do not."""
        try:
            grads = [*map(_GRAD_LOCAL, self.params)]
        except AttributeError:  # there is none
            return None
        return self._around(grads)

    def _around(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return memory_around(tensors, self.offsets, self.numel)

    def take_state(self, public: dict[Any, State]) -> State | None:
        """Joins the `DTensor`s' state; returns None, and changes nothing, if it cannot be joined."""
        states = [public.get(param) or {} for param in self.params]
        if any(state.keys() != states[0].keys() for state in states):
            return None
        joint = {name: self._joined(name, [state[name] for state in states]) for name in states[0]}
        if any(value is _UNLIKE for value in joint.values()):
            return None
        self.state, self.numbers = joint, {}
        self.show_in(public)
        return joint

    def _joined(self, name: str, values: list[Any]) -> Any:
        """Returns one value for those of all `DTensor`s; they may lie in it already."""
        if not isinstance(values[0], torch.Tensor):
            return values[0] if all(value == values[0] for value in values) else _UNLIKE
        locals_ = [getattr(value, "_local_tensor", value) for value in values]
        if {*map(_DTYPE, locals_)} != {values[0].dtype}:
            return _UNLIKE
        if name != "step" and [*map(_SHAPE, locals_)] == self._shapes:
            around = self._around(locals_)
            return self._copied(locals_) if around is None else around
        numbers = all(value.dim() == 0 for value in locals_)
        same = numbers and torch.equal(torch.stack(locals_), locals_[0].expand(len(locals_)))
        return locals_[0].clone() if same else _UNLIKE

    def _copied(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        joint = values[0].new_zeros(self.numel)
        for view, value in zip(self._views(joint), values):
            view.copy_(value)
        return joint

    def _views(self, joint: torch.Tensor) -> Iterator[torch.Tensor]:
        return (joint[start:stop].view(shape) for (start, stop), shape in zip(self._bounds, self._shapes))

    def show_in(self, public: dict[Any, State]) -> None:
        """Replaces the `DTensor`s' state by views of the joint one."""
        for param in self.params:
            for name in public.get(param, {}).keys() - self.state.keys():
                del public[param][name]
        for name, value in self.state.items():
            for param, shown in zip(self.params, self._shown(name, value)):
                public.setdefault(param, {})[name] = shown

    def _shown(self, name: str, value: Any) -> Iterable[Any]:
        """Returns a joint value's views for the states of the `DTensor`s."""
        if not isinstance(value, torch.Tensor):
            return repeat(value)
        if name != "step" and value.shape == self.shard.shape:
            return (copyable(holding(param, view)) for param, view in zip(self.params, self._views(value)))
        self.numbers[name] = value.expand(len(self.params)).clone()
        return self.numbers[name].unbind()


_UNLIKE = object()
"""Stands for values that cannot be one."""


class ShardRuns:
    """All runs of an optimizer, and the last seen state of those that are updated as one."""

    def __init__(self, groups: Iterable[Iterable[Any]]) -> None:
        self._runs = [run for params in groups for run in runs_in(params)]
        self._params = [*chain.from_iterable(run.params for run in self._runs)]
        self._counts = [len(run.params) for run in self._runs]
        self._firsts = [*accumulate(self._counts, initial=0)][:-1]
        self._specs: list[Any] = []  # of gradients that all lay as the shards do
        self._distances: list[int] = []  # of these from the first of their run, in bytes
        self._joint: Sequence[ShardRun] = ()
        self._values: list[Any] = []  # what is kept of those
        self._numbers: list[torch.Tensor] = []  # what the `DTensor`s have of it, by name and run
        self._sources: list[torch.Tensor] = []  # what that is to be
        self._versions: list[int] = []  # of the numbers

    def joint_gradients(self) -> dict[ShardRun, torch.Tensor]:
        """Returns the memory in which the gradients of a run lie as its shards do, where they do."""
        return self._all_gradients() or self._gradients_by_run()

    def _all_gradients(self) -> dict[ShardRun, torch.Tensor] | None:
        """Returns all runs' memory if all gradients are placed as when they last lay so; else None."""
        try:
            with DisableTorchFunctionSubclass():  # which a getter would look for on each
                grads = [*map(_GRAD, self._params)]
            if not same([*map(_SPEC, grads)], self._specs):
                return None
            locals_ = [*map(_LOCAL, grads)]
        except AttributeError:  # there is none
            return None
        firsts = [*map(locals_.__getitem__, self._firsts)]
        begins = chain.from_iterable(map(repeat, map(_DATA_PTR, firsts), self._counts))
        if [*map(_DATA_PTR, locals_)] != [*map(operator.add, begins, self._distances)]:
            return None
        if not all(map(_has_room, firsts, self._runs)):
            return None
        with torch.no_grad():
            return {
                run: torch.as_strided(first, (run.numel,), (1,)) for run, first in zip(self._runs, firsts)
            }

    def _gradients_by_run(self) -> dict[ShardRun, torch.Tensor]:
        grads = {run: grad for run in self._runs if (grad := run.joint_gradient()) is not None}
        self._specs = []
        if len(grads) == len(self._runs):
            self._specs = [param.grad._spec for param in self._params]
            self._distances = [
                offset * grad.itemsize for run, grad in grads.items() for offset in run.offsets
            ]
        return grads

    @property
    def are_untouched(self) -> bool:
        """Whether the public numbers have not been written to."""
        return [*map(_VERSION, self._numbers)] == self._versions

    def take_state(self, runs: Iterable[ShardRun], public: dict[Any, State]) -> dict[ShardRun, State]:
        """Joins the state of runs, where possible; these are updated as one from now on."""
        joint = {run: state for run in runs if (state := run.take_state(public)) is not None}
        self._joint = [*joint]
        self._note()
        return joint

    def hand_back(self, public: dict[Any, State]) -> bool:
        """Updates the `DTensor`s' state after a step; returns whether any value is new."""
        if same(self._state_values(), self._values):
            if self._numbers:
                foreach_copy_(self._numbers, self._sources)
            self._versions = [*map(_VERSION, self._numbers)]
            return False
        for run in self._joint:
            run.show_in(public)
        self._note()
        return True

    def _state_values(self) -> list[Any]:
        return [value for run in self._joint for value in run.state.values()]

    def _note(self) -> None:
        self._values = self._state_values()
        pairs = [(numbers, run.state[name]) for run in self._joint for name, numbers in run.numbers.items()]
        self._numbers = [numbers for numbers, _ in pairs]
        self._sources = [value.detach().expand_as(numbers) for numbers, value in pairs]
        self._versions = [*map(_VERSION, self._numbers)]


def same(current: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(current) == len(known) and all(map(operator.is_, current, known))


def _has_room(first: torch.Tensor, run: ShardRun) -> bool:
    """Whether the memory of a run fits where its first gradient begins; else neighbours lie so by chance."""
    end = (first.storage_offset() + run.numel) * first.itemsize
    return bool(end <= first.untyped_storage().nbytes())


def runs_in(params: Iterable[Any]) -> list[ShardRun]:
    """Returns runs of `DTensor`s of one group whose shards are adjacent in memory; leaves out single ones."""
    runs: list[list[Any]] = []
    filled = [param for param in params if param.dtype in _ALIKE and param._local_tensor.numel()]
    for param in sorted(filled, key=lambda param: param._local_tensor.data_ptr()):
        if runs and _follows(param, runs[-1][-1]):
            runs[-1].append(param)
        else:
            runs.append([param])
    return [ShardRun(run) for run in runs if len(run) > 1]


def _follows(param: Any, other: Any) -> bool:
    local: torch.Tensor = param._local_tensor
    before: torch.Tensor = other._local_tensor
    gap = local.data_ptr() - before.data_ptr() - before.nbytes
    near = 0 <= gap < (_PADDING if is_owned(param) and is_owned(other) else 1)
    alike = (param.dtype, param.requires_grad) == (other.dtype, other.requires_grad)
    if not near or not alike or (param.requires_grad and param.grad_dtype != other.grad_dtype):
        return False
    same_memory = local.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same_memory and local.is_contiguous() and before.is_contiguous()
