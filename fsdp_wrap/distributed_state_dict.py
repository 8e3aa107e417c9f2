"""The functions of `torch.distributed.checkpoint.state_dict`, for models wrapped by this library.

Torch's functions look for torch's own wrapper. These take the same arguments and options, and pass models
without any wrapper of this library to torch's functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torch_get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict as torch_set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torch_set_optimizer_state_dict

from fsdp_wrap._comm import deaths_told
from fsdp_wrap._core import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    clean_fqn,
    joined,
    named,
    params,
    walk,
)
from fsdp_wrap._core.torch_private import IncompatibleKeys, own_method
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state import (
    FirstRank,
    Originals,
    is_first_rank,
    is_sharded,
    load_optim_state_dict,
    owned_places,
    refuse_shared,
    resolve_settings,
    unsharded,
)
from fsdp_wrap._state_dict_methods import OptimStateDictMethods, StateDictMethods, settings_of

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Returns the model's state dict: sharded, or full tensors with `options.full_state_dict`.

    Sharded values are this rank's pieces, without communication. If a wrapper has a `device_mesh`, they are
    `DTensor`s of rows, for which the ranks exchange data.

    Args:
        model: A wrapped module, or a model with wrapped modules in it.
        submodules: Modules to restrict the result to; None for all.
        options: With `cpu_offload` the values are on the host, and full tensors on the first rank only.
            `ignore_frozen_params` leaves out parameters that need no gradient.
    """
    if not is_wrapped(model):
        with deaths_told():
            return torch_get_model_state_dict(model, submodules=submodules, options=options)
    return model_state(model, _prefixes(model, submodules), options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Returns the state of all optimizers in one dict, by names of parameters.

    Args:
        model: A wrapped module, or a model with wrapped modules in it.
        optimizers: One or several optimizers of the model's parameters.
        submodules: Modules to restrict the result to; None for all.
        options: See `get_model_state_dict`; with `flatten_optimizer_state_dict` the result has one level.

    Raises:
        ValueError: If a parameter is in two optimizers, since the result has one state per parameter.
    """
    optimizers = _checked_optimizers(model, optimizers)
    if not is_wrapped(model):
        with deaths_told():
            return torch_get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    return optim_state(model, optimizers, _prefixes(model, submodules), options)


def pieces_of_model(model: nn.Module) -> dict[str, Any]:
    """Returns a model's sharded state dict, with pieces from wrappers; no communication."""
    if not is_wrapped(model):
        return get_model_state_dict(model) if has_tensors(model) else model.state_dict()
    with settings_of(model, resolve_settings(StateDictType.SHARDED_STATE_DICT)):
        return _detached(own_method(model, "state_dict")(keep_vars=True))


def has_tensors(model: nn.Module) -> bool:
    """Returns whether a module has parameters or buffers; torch's functions fail without."""
    return any(True for _ in chain(model.parameters(), model.buffers()))


def _detached(state: dict[str, Any]) -> dict[str, Any]:
    state.update({name: v.detach() for name, v in state.items() if isinstance(v, torch.Tensor)})
    return state


def model_state(
    model: nn.Module, prefixes: Iterable[str] | None, options: StateDictOptions | None
) -> dict[str, Any]:
    """Returns `get_model_state_dict` of a wrapped model, for names with one of the prefixes."""
    options = _checked(options)
    on_first = options.full_state_dict and options.cpu_offload
    others_sharded = any(is_sharded(each) for each in (*model.parameters(), *model.buffers()))
    with _kind(model, options, everywhere=others_sharded):
        # The shards themselves, without copies, as with plain modules and `fully_shard`.
        state = _detached(own_method(model, "state_dict")(keep_vars=not options.full_state_dict))
    if options.full_state_dict and others_sharded:  # parts of the model are sharded by `fully_shard`
        state.update({name: unsharded(value) for name, value in state.items()})
    if on_first and not is_first_rank(model):
        return {}
    if options.cpu_offload:  # also tensors of no unit
        state.update({name: v.cpu() for name, v in state.items() if isinstance(v, torch.Tensor)})
    frozen = _frozen_names(model) if options.ignore_frozen_params else ()
    state = {_plain(name): value for name, value in state.items() if name not in frozen}
    return state if prefixes is None else _selected(state, prefixes, options)


def optim_state(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    prefixes: Iterable[str] | None,
    options: StateDictOptions | None,
) -> dict[str, Any]:
    """Returns `get_optimizer_state_dict` of a wrapped model, for names with one of the prefixes."""
    options = _checked(options)
    with _kind(model, options):
        parts = [OptimStateDictMethods.optim_state_dict(model, optimizer) for optimizer in optimizers]
    if not any(parts):
        return {}
    within = ("",) if prefixes is None else tuple(prefixes)
    entries = ((_plain(name), entry) for part in parts for name, entry in part["state"].items())
    state = {name: entry for name, entry in entries if name.startswith(within)}
    groups = [group for part in parts for group in part["param_groups"]]
    for group in groups:
        group["params"] = [name for name in map(_plain, group["params"]) if name.startswith(within)]
    whole = {"state": state, "param_groups": groups}
    return _flattened(whole) if options.flatten_optimizer_state_dict else whole


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the results of `get_model_state_dict` and `get_optimizer_state_dict`."""
    how: dict[str, Any] = {"submodules": submodules, "options": options}
    return get_model_state_dict(model, **how), get_optimizer_state_dict(model, optimizers, **how)


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Loads a model's state dict of full tensors, pieces, or torch's own kinds of sharded tensors.

    Args:
        model: A wrapped module, or a model with wrapped modules in it.
        model_state_dict: Values by names of the unwrapped module, or by modules: `{module: its state dict}`.
        options: With `broadcast_from_rank0` only the first rank's dict is read, and sent tensor by tensor.

    Returns:
        Missing and unexpected keys.

    Raises:
        RuntimeError: If keys are missing or unexpected, unless `options.strict` is False.
    """
    if not is_wrapped(model):
        with deaths_told():
            return torch_set_model_state_dict(model, model_state_dict, options=options)
    options = _checked(options)
    model_state_dict = _as_named_here(model, model_state_dict or {})
    if options.broadcast_from_rank0:
        model_state_dict = _from_first_rank(model, model_state_dict)
    elif not model_state_dict:
        return IncompatibleKeys([], [])
    # This kind cuts pieces from full tensors without communication.
    with StateDictMethods.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return own_method(model, "load_state_dict")(state_dict=model_state_dict, strict=options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads a result of `get_optimizer_state_dict`, nested or flattened.

    Args:
        model: A wrapped module, or a model with wrapped modules in it.
        optimizers: One or several optimizers of the model's parameters.
        optim_state_dict: State by names of parameters.
        options: With `broadcast_from_rank0`, or with `full_state_dict` and `cpu_offload`, only the first
            rank's dict is read. With `strict=False`, parameters that the model does not have are left out.

    Raises:
        ValueError: If a parameter is in two optimizers, or the state does not fit.
    """
    optimizers = _checked_optimizers(model, optimizers)
    if not is_wrapped(model):
        with deaths_told():
            torch_set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
        return
    options = _checked(options)
    if optim_state_dict and "state" not in optim_state_dict and "param_groups" not in optim_state_dict:
        optim_state_dict = _unflattened(model, optim_state_dict)
    optim_state_dict = _optim_as_named_here(model, optim_state_dict or {}, options.strict)
    first = options.broadcast_from_rank0 or (options.full_state_dict and options.cpu_offload)
    for optimizer in optimizers:
        fitting = load_optim_state_dict(model, optimizer, optim_state_dict, from_first_rank=first)
        own_method(optimizer, "load_state_dict")(state_dict=fitting)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Calls `set_model_state_dict`, if there is anything, and `set_optimizer_state_dict`; returns keys."""
    keys = IncompatibleKeys([], [])
    if is_to_load(bool(model_state_dict), options):
        keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


def is_to_load(given: bool, options: StateDictOptions | None) -> bool:
    """Returns whether a model state dict is to be loaded; the first rank decides where its own is sent."""
    found = [given]
    if options is not None and options.broadcast_from_rank0:
        with deaths_told():
            dist.broadcast_object_list(found)
    return found[0]


def is_wrapped(model: nn.Module) -> bool:
    """Returns whether any module at or below `model` is wrapped (`fully_shard` wraps none)."""
    return any(isinstance(module, StateDictMethods) for module in model.modules())


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends full tensors: set full_state_dict=True with it")
    return options


def _kind(model: nn.Module, options: StateDictOptions, everywhere: bool = False) -> Any:
    offload = options.cpu_offload
    if not options.full_state_dict:
        configs = ShardedStateDictConfig(offload), ShardedOptimStateDictConfig(offload)
        return StateDictMethods.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)
    of_model = FullStateDictConfig(offload, rank0_only=offload and not everywhere)
    of_optim = FullOptimStateDictConfig(offload, rank0_only=offload or options.broadcast_from_rank0)
    return StateDictMethods.state_dict_type(model, StateDictType.FULL_STATE_DICT, of_model, of_optim)


def _checked_optimizers(model: nn.Module, optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    if units_in(model):  # torch's functions check plain models
        refuse_shared(model, listed)
    return listed


def _frozen_names(model: nn.Module) -> set[str]:
    """Returns every name of every parameter that needs no gradient."""
    owned = owned_places(units_in(model).values())
    found = named(model, params, all_names=True)
    sources = ((name, owned[place].source if place in owned else param) for name, place, param in found)
    return {name for name, source in sources if source is not None and not source.requires_grad}


def _prefixes(model: nn.Module, submodules: Iterable[nn.Module] | None) -> list[str] | None:
    if submodules is None:
        return None
    wanted = set(submodules)
    return [_plain(f"{clean_fqn(name)}.") for name, module in model.named_modules() if module in wanted]


def _plain(name: str) -> str:
    """Returns a name as it is without `torch.compile`, as in torch's state dicts."""
    return name.replace("_orig_mod.", "")


def _as_named_here(model: nn.Module, state_dict: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns a state dict by the model's own names; the given one goes by torch's, or by modules."""
    own = [(clean_fqn(f"{name}.").lstrip("."), module) for name, module in walk(model, all_names=True)]
    here = {_plain(prefix): prefix for prefix, _ in own}
    by_name = {key: value for key, value in state_dict.items() if not isinstance(key, nn.Module)}
    for prefix, module in own:
        by_name |= {_plain(prefix) + name: value for name, value in state_dict.get(module, {}).items()}
    cut = ((name.rfind(".") + 1, name) for name in by_name)
    return {here.get(name[:end], name[:end]) + name[end:]: by_name[name] for end, name in cut}


def _optim_as_named_here(model: nn.Module, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Returns an optimizer's state dict by the model's own names; without those of others if not `strict`."""
    own = {key: name for name in Originals(model).by_name for key in (name, _plain(name))}
    groups = [dict(group) for group in given.get("param_groups", ())]
    others = set() if strict else {name for group in groups for name in group["params"]} - own.keys()
    state = {own.get(name, name): each for name, each in given.get("state", {}).items() if name not in others}
    for group in groups:
        group["params"] = [own.get(name, name) for name in group["params"] if name not in others]
    return {key: {**given, "state": state, "param_groups": groups}[key] for key in given}


def _selected(state: Mapping[str, Any], prefixes: Iterable[str], options: StateDictOptions) -> dict[str, Any]:
    return {
        name if options.keep_submodule_prefixes else name[len(prefix) :]: value
        for prefix in prefixes
        for name, value in state.items()
        if name.startswith(prefix)
    }


def _from_first_rank(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcasts the first rank's tensors; each rank keeps only its pieces. Collective."""
    owned = {name: each for name, each in Originals(model).by_name.items() if each.handle is not None}
    first = FirstRank(model)
    result: dict[str, Any] = {}
    for name, announced in first.announced(dict(state_dict or {})).items():
        value = first.fetched(announced)
        if name in owned and isinstance(value, torch.Tensor) and value.shape == owned[name].shape:
            value = owned[name].piece_of(value)
        result[name] = value
    return result


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"state.{n}.{key}": each for n, entry in given["state"].items() for key, each in entry.items()}
    for group in given["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": group[key] for key in group if key != "params"})
    return flat


def _unflattened(model: nn.Module, flat: Mapping[str, Any]) -> dict[str, Any]:
    names = {*map(_plain, Originals(model).by_name)}
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in flat.items():
        part, _, rest = path.partition(".")
        name = next((each for each in accumulate(rest.split("."), joined) if each in names), None)
        if part not in found or name in (None, rest):
            raise ValueError(
                f"'{path}' names no parameter of the model: flattened optimizer state has entries "
                "state.<parameter>.<kind> and param_groups.<parameter>.<option>"
            )
        found[part].setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups = [{**options, "params": [name]} for name, options in found["param_groups"].items()]
    return {"state": found["state"], "param_groups": groups}
