"""Model and optimizers take what was read together, on all ranks, or stay as they were."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fsdp_wrap._modules import WRAPPED_ATTR, original_class
from fsdp_wrap._torch_private import NormBase
from fsdp_wrap.checkpoint._state import Subject, staged
from fsdp_wrap.checkpoint._team import Team

__all__ = ["put_in"]


def put_in(
    team: Team, subject: Subject, model: dict[str, Any], optim: dict[str, Any] | None, strict: bool
) -> None:
    """Loads a model and its optimizers; collective.

    Args:
        team: The ranks that load.
        subject: What is loaded.
        model: The model's state.
        optim: All optimizers' state; None to leave theirs.
        strict: Whether the model's names must be the same.

    Raises:
        Exception: As the model or an optimizer raises, on all ranks; then nothing has changed.
    """
    optimizers = subject.optimizers if optim is not None else []
    cut = team.together(lambda: [subject.cut(each, optim) for each in optimizers])
    with ExitStack() as undo:
        for optimizer in optimizers:
            undo.callback(_Kept(optimizer).put_back)
        team.together(lambda: _load_each(optimizers, cut))
        if any(team.gather(_may_refuse(subject.model))):  # what modules only copy cannot fail any more
            undo.callback(_KeptTensors(subject.model_state()).put_back)
        team.together(lambda: subject.load_model(model, strict))
        undo.pop_all()


def _load_each(optimizers: Iterable[torch.optim.Optimizer], cut: Iterable[dict[str, Any]]) -> None:
    for optimizer, state in zip(optimizers, cut):
        optimizer.load_state_dict(state)


class _Kept:
    """An optimizer's state and groups as they are, by reference: loading replaces them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        inner: Any = optimizer
        while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):  # as clients wrap them
            inner = inner.optimizer
        self._optimizer = inner
        self._state = self._optimizer.state
        self._entries = {param: dict(entry) for param, entry in self._state.items()}
        self._groups = [dict(group) for group in self._optimizer.param_groups]

    def put_back(self) -> None:
        """Gives the optimizer what it had."""
        self._state.clear()
        self._state.update(self._entries)
        self._optimizer.state = self._state
        for group, before in zip(self._optimizer.param_groups, self._groups):
            group.clear()
            group.update(before)


class _KeptTensors:
    """A copy, in host memory, of a model's tensors."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self._copies = staged(self._tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        """Writes it into the model, past what modules do when they load."""
        for name, tensor in self._tensors.items():
            tensor.detach().copy_(self._copies[name])


def _may_refuse(model: nn.Module) -> bool:
    """Whether some module takes its values in a way of its own, which may fail half-way."""
    return any(map(_loads_its_own_way, model.modules()))


def _loads_its_own_way(module: nn.Module) -> bool:
    if WRAPPED_ATTR in module._modules:
        return False
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    makers = [getattr(hook, "hook", hook) for hook in hooks]
    users = [maker for maker in makers if not str(getattr(maker, "__module__", "")).startswith("torch.")]
    plain = (nn.Module._load_from_state_dict, NormBase._load_from_state_dict)
    own_class = original_class(module)
    own_way = own_class._load_from_state_dict not in plain
    return own_way or bool(users) or own_class.set_extra_state is not nn.Module.set_extra_state
