"""The parameters of optimizers: what users give them, which originals they stand for, and if once each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._modules import clean_fqn
from fsdp_wrap._originals import Originals
from fsdp_wrap._schedule import require_idle
from fsdp_wrap._unit import units_in

__all__ = ["GivenGroup", "given_groups", "keys_of", "originals_of", "params_by_key", "refuse_shared"]


@dataclass(frozen=True)
class GivenGroup:
    """A group of what an optimizer is made from.

    Attributes:
        params: In the order in which the optimizer numbers them.
        options: What the group has beside.
    """

    params: list[torch.Tensor]
    options: dict[str, Any]


def given_groups(module: nn.Module, optim_input: Any) -> list[GivenGroup]:
    """Reads what users give optimizers, in its order: parameters, or groups of them, perhaps with names.

    Args:
        module: Has the parameters.
        optim_input: Any iterable of these, read once; None for `module.parameters()`.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is empty, a group has no parameters, or a parameter is given twice.
    """
    groups = _read(module.parameters() if optim_input is None else optim_input)
    _refuse_repeated(Originals(module), (param for group in groups for param in group.params))
    return groups


def _read(optim_input: Any) -> list[GivenGroup]:
    if isinstance(optim_input, torch.Tensor) or not isinstance(optim_input, Iterable):
        raise TypeError(
            "optim_input must be an iterable of parameters or of parameter groups, not "
            f"{type(optim_input).__name__}"
        )
    given = list(optim_input)
    if not given:
        raise ValueError("optim_input holds no parameters: pass what the optimizer is made from, or None")
    if not any(isinstance(each, dict) for each in given):
        return [GivenGroup([_unnamed(each) for each in given], {})]
    groups = []
    for each in given:
        if not isinstance(each, dict):
            raise TypeError(
                f"optim_input mixes parameter groups with a {type(each).__name__}; pass one or the other"
            )
        if "params" not in each:
            raise ValueError(f"a parameter group of optim_input has no 'params', only {list(each)}")
        params = each["params"]
        listed = [params] if isinstance(params, torch.Tensor) else [_unnamed(param) for param in params]
        groups.append(GivenGroup(listed, {key: each[key] for key in each if key != "params"}))
    return groups


def _unnamed(param: Any) -> torch.Tensor:
    found = param[1] if isinstance(param, tuple) and len(param) == 2 else param  # of named_parameters()
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"optim_input must hold parameters or groups of them, not a {type(found).__name__}")
    return found


def refuse_shared(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Refuses optimizers that cannot have one state dict between them.

    Args:
        model: Has their parameters; wrapped or not.
        optimizers: Optimizers, or what clients have wrapped them in.

    Raises:
        ValueError: If a parameter is in two of them, or twice in one, by name.
    """
    held: dict[int, Any] = {}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        repeated = next((param for param in params if id(param) in held), None)
        names = Originals(model) if repeated is not None or len({*map(id, params)}) < len(params) else None
        if names is not None and repeated is not None:
            raise ValueError(
                f"{names.describe(repeated)} is in two optimizers ({type(held[id(repeated)]).__name__} "
                f"and {type(optimizer).__name__}), and a state dict has one state for it (rank {_rank()}): "
                "give every parameter to one optimizer"
            )
        if names is not None:
            _refuse_repeated(names, params)
        held.update((id(param), optimizer) for param in params)


def _refuse_repeated(names: Originals, params: Iterable[torch.Tensor]) -> None:
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            raise ValueError(
                f"{names.describe(param)} occurs twice in the optimizer's parameters, and has one state for "
                f"both (rank {_rank()}): pass it once"
            )
        seen.add(id(param))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def originals_of(model: nn.Module, optim: Any, doing: str) -> Originals:
    """Checks that now is the time for `doing`, and returns the model's parameters.

    Raises:
        RuntimeError: Inside a forward or backward.
        TypeError: If `optim` is neither an optimizer nor None.
        ValueError: If parameters were sharded by `fully_shard`, or the optimizer has one of them twice.
    """
    if optim is not None and not isinstance(optim, torch.optim.Optimizer):
        raise TypeError(f"optim must be a torch.optim.Optimizer, not {type(optim).__name__}")
    require_idle(units_in(model).values(), doing)
    names = Originals(model)
    if optim is not None:
        _refuse_repeated(names, (param for group in optim.param_groups for param in group["params"]))
    for original in names.by_name.values():
        if isinstance(original.source, DTensor):
            raise ValueError(
                f"parameter '{original.fqn}' was sharded by fully_shard, so its optimizer state is made of "
                "DTensors: take it with torch.distributed.checkpoint.state_dict, and shard the whole model so"
            )
    return names


def params_by_key(
    optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[list[Any], list[nn.Parameter]]]:
    """Yields, for each group, its parameters' keys in the optimizer's state dict, and the parameters."""
    for saved, group in zip(state_dict["param_groups"], optim.param_groups):
        yield saved["params"], group["params"]


def keys_of(names: Originals, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> list[list[Any]]:
    """Returns, for each group, the keys of its parameters in the optimizer's state dict, in their order.

    Args:
        names: The parameters of the model.
        optim: The optimizer.
        state_dict: Of it; without `param_groups` its parameters go by the keys that the optimizer uses now.
    """
    saved = state_dict if "param_groups" in state_dict else optim.state_dict()
    groups = zip(saved["param_groups"], optim.param_groups)
    return [_in_order(names, list(each["params"]), group["params"]) for each, group in groups]


def _in_order(names: Originals, keys: list[Any], params: Sequence[torch.Tensor]) -> list[Any]:
    """Puts keys into the order of the parameters that they name, if names is what they are.

    Optimizers that name their parameters may sort them in their state dicts.
    """
    if not all(isinstance(key, str) for key in keys):
        return keys
    named = {id(names.holders.get(clean_fqn(key))): key for key in keys}
    return [named[id(param)] for param in params] if {*map(id, params)} == named.keys() else keys
