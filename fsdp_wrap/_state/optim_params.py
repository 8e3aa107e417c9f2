"""Parameter groups of optimizers, and the original parameters behind their parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._core import clean_fqn
from fsdp_wrap._core.torch_private import own_method
from fsdp_wrap._params import holding, to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.originals import Original, Originals


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group of an optimizer, or of the argument that one would be made from.

    Attributes:
        params: By keys of the optimizer's state dict, the originals of each parameter.
        options: The group's other entries; None if they are not known.
    """

    params: dict[Any, list[Original]]
    options: dict[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """The originals' names as a plain optimizer's group has them.

        Where a sharded parameter stands for several, the order is that of the unwrapped module.
        """
        ordered = [original for originals in self.params.values() for original in originals]
        if len(ordered) > len(self.params):
            ordered.sort(key=lambda original: original.order)
        return [original.fqn for original in ordered]

    def saved_in(self, groups: Sequence[Mapping[str, Any]], place: int) -> dict[str, Any]:
        """Returns the group with the options of the saved group that has the same parameters.

        A group without parameters takes those of the one at its place.
        """
        if not self.params and place < len(groups) and not groups[place]["params"]:
            return copy.deepcopy({**groups[place]})
        options = saved_options(self.names, self.options, groups)
        if options is None:
            names = ", ".join(map(repr, self.names)) or "nothing"
            raise ValueError(
                f"no group with any of {names} was saved, so its options are not known: pass optim, "
                "not optim_input"
            )
        return {**options, "params": [*self.params]}


def saved_options(
    names: Iterable[str], own: dict[str, Any] | None, groups: Iterable[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Returns the options with which the parameters of one group were saved.

    Args:
        names: Names of the parameters.
        own: The group's options now, which stay where none of them was saved.
        groups: The saved groups.
    """
    by_name = {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
        for name in group.get("params", ())
    }
    known = [(name, by_name[name]) for name in names if name in by_name]
    if not known:
        return copy.deepcopy(own)
    (first, saved), *others = known
    for name, other in others:
        if saved.keys() != other.keys() or not all(same_values(saved[key], other[key]) for key in saved):
            raise ValueError(
                f"parameters '{first}' and '{name}' are in one group of the optimizer, but were saved in "
                f"groups with other options: {saved} and {other}; make groups as they were"
            )
    kept = {key: value for key, value in (own or {}).items() if key == "param_names"}
    return {**copy.deepcopy(saved), **kept}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a parameter group save its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def same_values(one: Any, other: Any) -> bool:
    """Whether two values, perhaps tensors, are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same_kind and torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True)
    return bool(one == other or (one != one and other != other))  # the latter: not a number


def placed_like(param: torch.Tensor, key: str, value: Any) -> Any:
    """Converts a value of a `DTensor`'s state from its local tensor to the `DTensor`."""
    if isinstance(value, dict):
        return {name: placed_like(param, name, inner) for name, inner in value.items()}
    elementwise = isinstance(value, torch.Tensor) and value.shape == to_local(param).shape
    return holding(param, value) if elementwise and key != "step" else value


# of an optimizer


def originals_of(model: nn.Module, optim: Any, doing: str, as_dtensors: bool = False) -> Originals:
    """Returns the model's parameters, once `doing` is allowed; `as_dtensors` as for `Originals`."""
    if optim is not None and not isinstance(optim, torch.optim.Optimizer):
        raise TypeError(f"optim must be a torch.optim.Optimizer, not {type(optim).__name__}")
    require_idle(units_in(model).values(), doing)
    if optim is not None:
        refuse_shared(model, [optim])
    names = Originals(model, as_dtensors)
    for original in () if as_dtensors else names.by_name.values():
        if isinstance(original.source, DTensor):
            raise ValueError(
                f"parameter '{original.fqn}' was sharded by fully_shard, so its optimizer state is made of "
                "DTensors: take it with torch.distributed.checkpoint.state_dict, and shard the whole model so"
            )
    return names if optim is None else names.as_held_by(optim)


def groups_of(names: Originals, optim: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[ParamGroup]:
    """Returns an optimizer's groups.

    Args:
        names: The parameters of the model.
        optim: The optimizer.
        saved: Its state dict; without `param_groups` its parameters go by the keys that it uses now.
    """
    saved = saved if "param_groups" in saved else own_method(optim, "state_dict")()
    groups = []
    for group, now in zip(saved["param_groups"], optim.param_groups):
        keys = _in_order(names, group["params"], now["params"])
        groups.append(ParamGroup(dict(zip(keys, map(names.of, now["params"]))), options_of(group)))
    return groups


def _in_order(names: Originals, keys: Sequence[Any], params: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Sorts keys that are names into the order of the parameters that they name.

    Optimizers that name their parameters may sort them in their state dicts.
    """
    if not all(isinstance(key, str) for key in keys):
        return keys
    named = {id(names.holders.get(clean_fqn(key))): key for key in keys}
    return [named[id(param)] for param in params] if {*map(id, params)} == named.keys() else keys


def given_groups(module: nn.Module, names: Originals, optim_input: Any) -> list[ParamGroup]:
    """Returns the groups of an optimizer's argument: parameters, or groups of them, perhaps with names.

    Args:
        module: Has the parameters.
        names: The same, by name.
        optim_input: Any iterable of these, read once; None for `module.parameters()`.

    Returns:
        Groups without options, whose keys count the parameters.
    """
    given = module.parameters() if optim_input is None else optim_input
    if not isinstance(given, torch.Tensor):  # optimizers change the groups that they get
        given = [dict(entry) if isinstance(entry, dict) else entry for entry in given]
    try:
        optim = torch.optim.Optimizer(given, {})
    except KeyError as error:
        raise ValueError(f"a parameter group of optim_input has no {error}") from error
    refuse_shared(module, [optim])
    return [replace(group, options=None) for group in groups_of(names, optim, {})]


# each once


def refuse_shared(model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Refuses optimizers that cannot have one state dict between them.

    Args:
        model: Has their parameters; wrapped or not.
        optimizers: Optimizers, or what clients have wrapped them in.
    """
    owners: dict[int, Any] = {}
    for optimizer in optimizers:
        for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(param) not in owners:
                owners[id(param)] = optimizer
                continue
            described, owner = Originals(model).describe(param), owners[id(param)]
            if owner is optimizer:
                raise ValueError(
                    f"{described} occurs twice in the optimizer's parameters, and has one state for both "
                    f"(rank {rank()}): pass it once"
                )
            raise ValueError(
                f"{described} is in two optimizers ({type(owner).__name__} and {type(optimizer).__name__}), "
                f"and has one state for both (rank {rank()}): give every parameter to one optimizer"
            )


def rank() -> int:
    """Returns this rank, as the default group counts; for messages."""
    return dist.get_rank() if dist.is_initialized() else 0
