"""`RepeatedUpdate`: computes an elementwise optimizer's update again, and compares the bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn, optim

from fsdp_wrap._params import to_local
from fsdp_wrap._values.auditing.corruption import UPDATE, Corruption
from fsdp_wrap._values.auditing.parts import AuditedSegment
from fsdp_wrap._values.auditing.twice import first_different, same_bits

_ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop),
}


class _Before(NamedTuple):
    """A parameter with a copy of all that its update depends on."""

    param: nn.Parameter
    part: AuditedSegment
    copied: nn.Parameter
    optimizer: optim.Optimizer


class RepeatedUpdate:
    """The update of a drawn parameter of this rank."""

    def __init__(self) -> None:
        self._before: _Before | None = None

    def before(
        self,
        optimizer: optim.Optimizer,
        owners: Mapping[int, AuditedSegment],
        draw: Random,
        with_closure: bool,
    ) -> None:
        """Copies a drawn parameter; `owners` are those of sharded parameters, by id."""
        self._before = None
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if type(optimizer) not in _ELEMENTWISE or with_closure or hooked:
            return
        held = [
            (param, group)
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in owners and param.grad is not None and to_local(param).numel()
        ]
        if not held:
            return
        param, group = draw.choice(held)
        copied = nn.Parameter(_copy(param), param.requires_grad)
        copied.grad = _copy(param.grad)
        plain = all(type(member) is nn.Parameter for member in group["params"])
        group = {**group, "params": [copied]}
        if not plain and group.get("foreach") is None:
            group["foreach"] = False  # as torch chooses for other classes
        twin = object.__new__(type(optimizer))
        state = {name: _copy(value) for name, value in optimizer.state.get(param, {}).items()}
        vars(twin).update(vars(optimizer), param_groups=[group], state=defaultdict(dict))
        if state:
            twin.state[copied] = state
        self._before = _Before(param, owners[id(param)], copied, twin)

    def check(self, rank: int, step: int) -> Corruption | None:
        """Computes the update again; returns a finding if it has other bits."""
        before, self._before = self._before, None
        if before is None:
            return None
        undecorated: Any = type(before.optimizer).step.__wrapped__  # type: ignore[attr-defined]
        undecorated(before.optimizer)
        updated, expected = to_local(before.param.detach()), before.copied.detach()
        if same_bits(updated, expected):
            return None
        part = before.part
        (first,), count = first_different(updated.reshape(-1), expected.reshape(-1))
        first += (updated.data_ptr() - part.sharded.flat_param.data_ptr()) // updated.element_size()
        told = f"{type(before.optimizer).__name__}, computed again from the same numbers, gives others"
        return part.corruption(rank, step, UPDATE, told, part.element_at(first), count=count)


def _copy(value: Any) -> Any:
    return to_local(value.detach()).clone() if isinstance(value, torch.Tensor) else value
