"""What a checkpoint is made of: model, optimizers, a rank's extras and random states; taken and put back."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_wrap._optim_load import load_optim_state_dict
from fsdp_wrap._optim_params import refuse_shared
from fsdp_wrap.checkpoint._holders import refuse_fewer_ranks
from fsdp_wrap.checkpoint._optimizer_of_dtensors import cut_for, taken_of
from fsdp_wrap.checkpoint._plain import packed
from fsdp_wrap.checkpoint._team import Team
from fsdp_wrap.distributed_state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_wrap.optim_state_dict import sharded_optim_state_dict

__all__ = ["Subject", "set_random_state", "staged"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Subject:
    """A model, its optimizers and extras, checked, as they are saved and loaded.

    Args:
        model: Wrapped by anything, or plain.
        optim: One or several optimizers of it, or None.
        extra: By name: objects with `state_dict` and `load_state_dict`, or values that pickle.

    Raises:
        TypeError: If one of these is of another type.
        ValueError: If a parameter is in two optimizers, whose states for it could not both be saved.
    """

    def __init__(self, model: nn.Module, optim: Optimizers, extra: Mapping[str, Any] | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a module, not {type(model).__name__}")
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = _listed(optim)
        refuse_shared(self.model, self.optimizers)
        if not isinstance(extra or {}, Mapping) or not all(isinstance(name, str) for name in extra or {}):
            raise TypeError("extra must be a mapping of names to values")
        self.extra: dict[str, Any] = dict(extra or {})

    def taken(self, team: Team) -> dict[str, Any]:
        """Returns all of it for `torch.distributed.checkpoint`; tensors are those of model and optimizers.

        Raises:
            ValueError: If other ranks than those of the team hold parts of the model.
        """
        refuse_fewer_ranks(self.model, team.ranks)
        rank = team.rank
        state: dict[str, Any] = {"model": dict(self.model_state())}
        if self.optimizers:
            state["optim"] = self._optim_state()
        state["extra"] = {str(rank): {name: _packed_extra(name, each) for name, each in self.extra.items()}}
        state["random"] = {str(rank): packed(_random_state())}
        return state

    def model_state(self) -> dict[str, Any]:
        """Returns the model's state dict, of pieces where it is sharded."""
        return get_model_state_dict(self.model)

    def _optim_state(self) -> dict[str, Any]:
        by_name = self._is_of_dtensors()
        parts = [
            taken_of(self.model, each)
            if by_name
            else sharded_optim_state_dict(self.model, each, None, to_host=False)
            for each in self.optimizers
        ]
        return {
            "state": {name: entry for part in parts for name, entry in part["state"].items()},
            "param_groups": [group for part in parts for group in part["param_groups"]],
        }

    def cut(self, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
        """Returns what one of the optimizers takes of all optimizers' state; refuses what does not fit."""
        load = cut_for if self._is_of_dtensors() else load_optim_state_dict
        return load(self.model, optimizer, state)

    def load_model(self, state: dict[str, Any], strict: bool) -> None:
        """Loads the model alone."""
        set_model_state_dict(self.model, state, options=StateDictOptions(strict=strict))

    def put_in_extra(self, values: dict[str, Any]) -> dict[str, Any]:
        """Loads the objects among the extras; returns all values, and these objects in place of theirs."""
        for name, each in self.extra.items():
            if isinstance(each, Stateful) and name in values:
                each.load_state_dict(values[name])
                values[name] = each
        return values

    def _is_of_dtensors(self) -> bool:
        """Whether the model is sharded by torch's own tensors alone."""
        wrapped = FullyShardedDataParallel.fsdp_modules(self.model)
        return not wrapped and any(isinstance(p, DTensor) for p in self.model.parameters())


def _listed(optim: Any) -> list[torch.optim.Optimizer]:
    if optim is None:
        return []
    found = list(optim) if isinstance(optim, (list, tuple)) else [optim]
    for each in found:
        if not isinstance(getattr(each, "param_groups", None), list):  # clients wrap optimizers
            raise TypeError(f"optim must be one or several optimizers, not {type(each).__name__}")
    return found


def staged(state: Any) -> Any:
    """Returns a copy in host memory that later training does not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: staged(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and type(state) in (list, tuple):
        return type(state)(map(staged, state))
    return copy.deepcopy(state)


def _packed_extra(name: str, value: Any) -> bytes:
    try:
        return packed(value.state_dict() if isinstance(value, Stateful) else value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"extra['{name}'] ({type(value).__name__}) cannot be pickled: {error}") from error


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets the generators of torch, Python and, where they are there, numpy and the CUDA device."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
