"""`Run`: several `DTensor`s whose shards lie one after the other, updated as one plain tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import is_owned
from fsdp_wrap._params import copyable, holding, memory_around

_PADDING = 16
"""Units begin each shard at a multiple of so many bytes; what is between is nobody's."""

_VERSION = operator.attrgetter("_version")
_GRAD_LOCAL = operator.attrgetter("grad._local_tensor")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")

State = dict[str, Any]


class Run:
    """`DTensor`s of one group of an optimizer, whose shards lie one after the other.

    What the optimizer keeps of the run is of the size of them all; in public each has its own view of it.
    Numbers, such as counts of steps, are equal for all, and each has its own.

    Args:
        params: The `DTensor`s.

    Attributes:
        params: The same.
        shard: What an optimizer updates in their place.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = params
        self._locals = [param._local_tensor for param in params]
        first, sizes = self._locals[0], [local.numel() for local in self._locals]
        begin, size = first.data_ptr(), first.element_size()
        self._offsets = [(local.data_ptr() - begin) // size for local in self._locals]
        self._bounds = [*zip(self._offsets, map(operator.add, self._offsets, sizes))]
        self._numel = self._bounds[-1][1]
        memory = torch.as_strided(first.detach(), (self._numel,), (1,))
        self.shard = nn.Parameter(memory, requires_grad=params[0].requires_grad)
        if self.shard.requires_grad:
            self.shard.grad_dtype = params[0].grad_dtype
        self._state: State = {}
        self._known: list[Any] = []  # its values
        self._numbers: dict[str, torch.Tensor] = {}  # for each name those of all `DTensor`s
        self._versions: list[int] = []

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has written to the numbers in public."""
        return [*map(_VERSION, self._numbers.values())] == self._versions

    def joint_gradient(self) -> torch.Tensor | None:
        """Returns the memory in which the gradients lie as the shards do; None if they do not."""
        try:
            grads = [*map(_GRAD_LOCAL, self.params)]
        except AttributeError:  # there is none
            return None
        return self._around(grads)

    def _around(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return memory_around(tensors, self._offsets, self._numel)

    def take_state(self, public: dict[Any, State]) -> State | None:
        """Joins what state the `DTensor`s have; returns None, and changes nothing, if it cannot be joined."""
        states = [public.get(param) or {} for param in self.params]
        if any(state.keys() != states[0].keys() for state in states):
            return None
        joint = {name: self._joined(name, [state[name] for state in states]) for name in states[0]}
        if any(value is _UNLIKE for value in joint.values()):
            return None
        self._state, self._numbers = joint, {}
        self._show_in(public)
        return joint

    def _joined(self, name: str, values: list[Any]) -> Any:
        """Returns one value for those of all `DTensor`s; they may lie in it already."""
        if not isinstance(values[0], torch.Tensor):
            return values[0] if all(value == values[0] for value in values) else _UNLIKE
        locals_ = [getattr(value, "_local_tensor", value) for value in values]
        if {*map(_DTYPE, locals_)} != {values[0].dtype}:
            return _UNLIKE
        if name != "step" and [*map(_SHAPE, locals_)] == [*map(_SHAPE, self._locals)]:
            around = self._around(locals_)
            return self._copied(locals_) if around is None else around
        numbers = all(value.dim() == 0 for value in locals_)
        same = numbers and torch.equal(torch.stack(locals_), locals_[0].expand(len(locals_)))
        return locals_[0].clone() if same else _UNLIKE

    def _copied(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        joint = values[0].new_zeros(self._numel)
        for view, value in zip(self._views(joint), values):
            view.copy_(value)
        return joint

    def _views(self, joint: torch.Tensor) -> Iterator[torch.Tensor]:
        return (joint[start:stop].view_as(local) for (start, stop), local in zip(self._bounds, self._locals))

    def hand_back(self, public: dict[Any, State]) -> bool:
        """Lets the `DTensor`s have what a step has made of the state; returns whether any of it is new."""
        values = [*self._state.values()]
        if len(values) != len(self._known) or not all(map(operator.is_, values, self._known)):
            self._show_in(public)
            return True
        for name, numbers in self._numbers.items():
            numbers.fill_(self._state[name])
        self._versions = [*map(_VERSION, self._numbers.values())]
        return False

    def _show_in(self, public: dict[Any, State]) -> None:
        for param in self.params:
            for name in public.get(param, {}).keys() - self._state.keys():
                del public[param][name]
        for name, value in self._state.items():
            for param, shown in zip(self.params, self._shown(name, value)):
                public.setdefault(param, {})[name] = shown
        self._known = [*self._state.values()]
        self._versions = [*map(_VERSION, self._numbers.values())]

    def _shown(self, name: str, value: Any) -> Iterable[Any]:
        """Returns what stands for a joint value in the states of the `DTensor`s."""
        if not isinstance(value, torch.Tensor):
            return repeat(value)
        if name != "step" and value.shape == self.shard.shape:
            return (copyable(holding(param, view)) for param, view in zip(self.params, self._views(value)))
        self._numbers[name] = value.expand(len(self.params)).clone()
        return self._numbers[name].unbind()


_UNLIKE = object()
"""Stands for values that cannot be one."""


def runs_in(params: Iterable[Any]) -> list[Run]:
    """Returns the runs of several among the `DTensor`s of one group; those that fit no run are left out."""
    found: list[list[Any]] = []
    filled = [param for param in params if param._local_tensor.numel()]
    for param in sorted(filled, key=lambda param: param._local_tensor.data_ptr()):
        if found and _follows(param, found[-1][-1]):
            found[-1].append(param)
        else:
            found.append([param])
    return [Run(each) for each in found if len(each) > 1]


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
