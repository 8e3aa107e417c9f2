"""Model, optimizers, a rank's extras and random states: taken for a checkpoint, and put back."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_wrap._core import WRAPPED_ATTR, clean_fqn, listed, original_class
from fsdp_wrap._core.torch_private import NormBase, pytree
from fsdp_wrap._runtime import buffers_of, units_in
from fsdp_wrap._state import (
    Originals,
    as_saved,
    innermost,
    load_optim_state_dict,
    refuse_shared,
    sharded_optim_state_dict,
)
from fsdp_wrap.checkpoint._storage import packed
from fsdp_wrap.checkpoint._team import Team
from fsdp_wrap.distributed_state_dict import is_wrapped, load_pieces, pieces_of_model

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


_TORCHS = "torch.distributed.fsdp.fully_sharded_data_parallel"


def _refuse_torchs_wrapper(model: nn.Module) -> None:
    """Refuses optimizers of torch's wrapper, whose parameters are pieces that look like whole ones."""
    for name, module in model.named_modules():
        if any(cls.__module__ == _TORCHS for cls in type(module).__mro__):
            culprit = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{culprit} is wrapped by torch's FullyShardedDataParallel, "
                "whose optimizer state only torch's functions know: save and load it by get_state_dict, "
                "set_state_dict and torch.distributed.checkpoint, or pass the model without optimizers"
            )


class Subject:
    """The model, optimizers (which may not share a parameter) and extras of a save or load, checked."""

    def __init__(self, model: nn.Module, optim: Optimizers, extra: Mapping[str, Any] | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a module, not {type(model).__name__}")
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizers = _optimizers_of(optim)
        if self.optimizers:
            _refuse_torchs_wrapper(self.model)
        refuse_shared(self.model, self.optimizers)
        if not isinstance(extra or {}, Mapping) or not all(isinstance(name, str) for name in extra or {}):
            raise TypeError(f"extra must map names to values, and is {extra!r:.200}")
        self.extra: dict[str, Any] = dict(extra or {})

    def taken(self, team: Team) -> dict[str, Any]:
        """Returns the state dict for DCP, with the model's and the optimizers' own tensors."""
        _refuse_fewer_ranks(self.model, team.ranks)
        rank = str(team.rank)
        optim = {"optim": self._optim_state()} if self.optimizers else {}
        extra = {rank: {name: _packed_extra(name, value) for name, value in self.extra.items()}}
        random_states = {rank: packed(_random_state())}
        return {"model": dict(self.model_state()), **optim, "extra": extra, "random": random_states}

    def model_state(self) -> dict[str, Any]:
        """Returns the model's state dict, of pieces where it is sharded."""
        return pieces_of_model(self.model)

    def _optim_state(self) -> dict[str, Any]:
        # Torch's functions for `DTensor`s step an optimizer that was never stepped, and refuse trainable
        # parameters that never had a gradient.
        how = {"to_host": False, "all_names": False, "as_dtensors": self._is_of_dtensors()}
        parts = [
            sharded_optim_state_dict(self.model, optimizer, None, **how) for optimizer in self.optimizers
        ]
        return {
            "state": {name: entry for part in parts for name, entry in part["state"].items()},
            "param_groups": [group for part in parts for group in part["param_groups"]],
        }

    def put_in(self, team: Team, model: dict[str, Any], optim: dict[str, Any] | None, strict: bool) -> None:
        """Loads the model and its optimizers on all ranks, or leaves all of them as they were."""
        optimizers = self.optimizers if optim is not None else []
        cut, refusing = team.agreed(
            lambda: ([self._cut(optimizer, optim, model) for optimizer in optimizers], may_refuse(self.model))
        )

        def load_optimizers() -> None:
            for optimizer, (state, restore) in zip(optimizers, cut):
                optimizer.load_state_dict(state)
                restore()

        with ExitStack() as undo:
            for optimizer in optimizers:
                undo.callback(_kept(optimizer))
            team.together(load_optimizers)
            if any(refusing):  # what modules only copy cannot fail any more
                undo.callback(_kept_tensors(self.model_state()))
            team.together(lambda: load_pieces(self.model, model, strict))
            undo.pop_all()

    def put_in_extra(self, values: dict[str, Any]) -> dict[str, Any]:
        """Loads extras that are `Stateful`; returns all values, with the objects in place of their state."""
        for name, value in self.extra.items():
            if isinstance(value, Stateful) and name in values:
                value.load_state_dict(values[name])
                values[name] = value
        return values

    def _cut(
        self, optimizer: torch.optim.Optimizer, state: Any, model: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Returns one optimizer's part of the state, and a function that then restores its dtypes."""
        as_dtensors = self._is_of_dtensors()
        cut = load_optim_state_dict(self.model, optimizer, state, as_dtensors=as_dtensors, own=True)
        dtypes = {name: value.dtype for name, value in model.items() if isinstance(value, torch.Tensor)}
        originals = Originals(self.model, as_dtensors)
        return cut, as_saved(lambda param: originals.of(param)[0].fqn, optimizer, cut, dtypes)

    def _is_of_dtensors(self) -> bool:
        """Whether the model is sharded by torch's own tensors alone."""
        return not is_wrapped(self.model) and any(isinstance(p, DTensor) for p in self.model.parameters())


def _optimizers_of(optim: Any) -> list[torch.optim.Optimizer]:
    if optim is None:
        return []
    optimizers = list(optim) if isinstance(optim, (list, tuple)) else [optim]
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), list):  # clients wrap optimizers
            raise TypeError(f"optim must be one or several optimizers, not {type(optimizer).__name__}")
    return optimizers


def _refuse_fewer_ranks(model: nn.Module, ranks: Collection[int]) -> None:
    """Raises unless the ranks, numbered as in the default group, hold all of the model."""
    for name, holders in _holders(model):
        if lacking := set(holders) - set(ranks):
            saving, sharding, missing = (listed(sorted(numbers)) for numbers in (ranks, holders, lacking))
            raise ValueError(
                f"process_group has the ranks {saving}, but '{name}' is sharded over {sharding}: the parts "
                f"of {missing} would be missing; save by all ranks that shard the model"
            )


def _holders(model: nn.Module) -> Iterator[tuple[str, Collection[int]]]:
    """Yields names of parameters with the ranks over which they are sharded, without replicas."""
    for buffers in buffers_of(units_in(model).values()):
        for segment in buffers.segments:
            if segment.layout.sharded and segment.layout.fqns:
                yield segment.layout.fqns[0], buffers.communicator.members
    ranks = cache(lambda mesh, dim: dist.get_process_group_ranks(mesh.get_group(dim)))
    for name, param in (
        (name, param) for name, param in model.named_parameters() if isinstance(param, DTensor)
    ):
        for dim, placement in enumerate(param.placements):
            if not placement.is_replicate():
                yield clean_fqn(name), ranks(param.device_mesh, dim)


@torch.no_grad()
def staged(state: Any) -> Any:
    """Returns a copy in host memory that later training does not change."""
    return pytree.tree_map(
        lambda value: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value),
        state,
    )


# extras and random states


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


# what a load that fails leaves as it was


def _kept(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns a function that puts an optimizer's present state and groups back; loading replaces them."""
    inner = innermost(optimizer)
    state, entries = inner.state, {param: dict(entry) for param, entry in inner.state.items()}
    groups = [dict(group) for group in inner.param_groups]

    def put_back() -> None:
        state.clear()
        state.update(entries)
        inner.state = state
        for group, before in zip(inner.param_groups, groups):
            group.clear()
            group.update(before)

    return put_back


def _kept_tensors(state: Mapping[str, Any]) -> Callable[[], None]:
    """Returns a function that puts a model's present values back, past modules' own ways of loading."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    copies = staged(tensors)

    @torch.no_grad()
    def put_back() -> None:
        for name, tensor in tensors.items():
            tensor.detach().copy_(copies[name])

    return put_back


def may_refuse(model: nn.Module) -> bool:
    """Whether some module has its own way of loading, which may fail half-way."""
    return any(
        _loads_its_own_way(module) for module in model.modules() if WRAPPED_ATTR not in module._modules
    )


def _loads_its_own_way(module: nn.Module) -> bool:
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    makers = [getattr(hook, "hook", hook) for hook in hooks]
    users = [maker for maker in makers if not str(getattr(maker, "__module__", "")).startswith("torch.")]
    own_class = original_class(module)
    plain = (nn.Module._load_from_state_dict, NormBase._load_from_state_dict)
    takes_extra = own_class.set_extra_state is not nn.Module.set_extra_state
    return bool(users) or takes_extra or own_class._load_from_state_dict not in plain
