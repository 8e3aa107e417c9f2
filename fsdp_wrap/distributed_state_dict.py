"""The functions of `torch.distributed.checkpoint.state_dict`, and what they call for wrapped models.

`_torch_helpers` lets torch's functions call these. Full state dicts have full tensors. Sharded ones have this
rank's pieces, without communication, or `DTensor`s of rows where a wrapper has a `device_mesh`: for these the
ranks exchange data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fsdp_wrap._core import (
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
from fsdp_wrap._core.torch_private import own_method
from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._runtime import units_in
from fsdp_wrap._settings import resolve_settings
from fsdp_wrap._state import (
    FirstRank,
    Originals,
    full_optim_state_dict,
    is_sharded,
    load_optim_state_dict,
    owned_places,
    uncompiled_fqn,
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


def pieces_of_model(model: nn.Module) -> dict[str, Any]:
    """Returns a model's sharded state dict, with pieces from wrappers; no communication."""
    if not is_wrapped(model):
        return get_model_state_dict(model) if _has_tensors(model) else model.state_dict()
    with settings_of(model, resolve_settings(StateDictType.SHARDED_STATE_DICT)):
        state = own_method(model, "state_dict")(keep_vars=True)
    return {uncompiled_fqn(name): _without_grad(value) for name, value in state.items()}


def load_pieces(model: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Loads a result of `pieces_of_model`; no communication between wrappers."""
    options = StateDictOptions(strict=strict)
    if is_wrapped(model):
        load_model_state(model, state_dict, options)
    elif _has_tensors(model):
        set_model_state_dict(model, dict(state_dict), options=options)
    else:
        model.load_state_dict(state_dict, strict=strict)


def _has_tensors(model: nn.Module) -> bool:
    """Returns whether a module has parameters or buffers; torch's functions fail without."""
    return any(True for _ in chain(model.parameters(), model.buffers()))


def _without_grad(value: Any) -> Any:
    """Detaches a value; pieces, which nobody else has, remain the same objects."""
    if type(value) is IntervalTensor:
        return value.requires_grad_(False)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _detached(state: dict[str, Any]) -> dict[str, Any]:
    state.update({name: v.detach() for name, v in state.items() if isinstance(v, torch.Tensor)})
    return state


def model_state(model: nn.Module, options: Any) -> dict[str, Any]:
    """Returns `get_model_state_dict` of a wrapped model; `options` are what torch has made of the user's."""
    if not options.handle_model:
        return {}
    on_first = options.full_state_dict and options.cpu_offload
    others_sharded = any(is_sharded(tensor) for tensor in (*model.parameters(), *model.buffers()))
    with _kind(model, options, everywhere=others_sharded):
        # The shards themselves, without copies, as with plain modules and `fully_shard`.
        state = _detached(own_method(model, "state_dict")(keep_vars=not options.full_state_dict))
    if options.full_state_dict and others_sharded:  # parts of the model are sharded by `fully_shard`
        state.update({name: unsharded(value) for name, value in state.items()})
    if on_first and not FirstRank(model).is_here:
        return {}
    if options.cpu_offload:  # also tensors of no unit
        state.update({name: v.cpu() for name, v in state.items() if isinstance(v, torch.Tensor)})
    frozen = _frozen_names(model) if options.ignore_frozen_params else ()
    state = {uncompiled_fqn(name): value for name, value in state.items() if name not in frozen}
    return _selected(state, options) if options.submodule_prefixes else state


def optim_state(model: nn.Module, optims: Iterable[torch.optim.Optimizer], options: Any) -> dict[str, Any]:
    """Returns `get_optimizer_state_dict` of a wrapped model; `options` as for `model_state`."""
    if not options.handle_optim:
        return {}
    if options.full_state_dict:
        # Torch's functions also give an optimizer that was never stepped something to load into.
        only = FirstRank(model) if options.cpu_offload or options.broadcast_from_rank0 else None
        how: dict[str, Any] = {"to_host": options.cpu_offload, "only": only, "initial": True}
        parts = [full_optim_state_dict(model, optimizer, None, **how) for optimizer in optims]
    else:
        with _kind(model, options):
            parts = [OptimStateDictMethods.optim_state_dict(model, optimizer) for optimizer in optims]
    if not any(parts):
        return {}
    within = tuple(options.submodule_prefixes) or ("",)
    entries = chain.from_iterable(part["state"].items() for part in parts)
    state = {name: entry for name, entry in entries if name.startswith(within)}
    groups = [group for part in parts for group in part["param_groups"]]
    for group in groups:
        group["params"] = [name for name in group["params"] if name.startswith(within)]
    whole = {"state": state, "param_groups": groups}
    return _flattened(whole) if options.flatten_optimizer_state_dict else whole


def load_model_state(model: nn.Module, state_dict: Mapping[Any, Any], options: StateDictOptions) -> Any:
    """Loads full tensors, pieces, or torch's own kinds of sharded tensors; returns keys that do not fit."""
    if options.broadcast_from_rank0:
        state_dict = _from_first_rank(model, state_dict)
    state_dict = by_own_names(model, state_dict)
    # This kind cuts pieces from full tensors without communication.
    with StateDictMethods.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return own_method(model, "load_state_dict")(state_dict=state_dict, strict=options.strict)


def load_optim_state(
    model: nn.Module, optims: Iterable[torch.optim.Optimizer], state_dict: Mapping[str, Any], options: Any
) -> None:
    """Loads optimizers' state by names of parameters, nested or flattened; `options` as for `model_state`.

    With `strict=False`, parameters that the model does not have are left out. Parameters without state were
    never stepped, and get none. Torch's function, which a model of `DTensor`s alone would do with, refuses
    these, and an optimizer without state while there are gradients.
    """
    if not options.handle_optim:
        return
    if state_dict and "state" not in state_dict and "param_groups" not in state_dict:
        state_dict = _unflattened(model, state_dict)
    if state_dict and not options.strict:
        state_dict = _without_others(model, state_dict)
    first = options.broadcast_from_rank0 or (options.full_state_dict and options.cpu_offload)
    as_dtensors = not is_wrapped(model)
    for optimizer in optims:
        fitting = load_optim_state_dict(
            model, optimizer, state_dict, from_first_rank=first, as_dtensors=as_dtensors
        )
        own_method(optimizer, "load_state_dict")(state_dict=fitting)


def is_wrapped(model: nn.Module) -> bool:
    """Returns whether any module at or below `model` is wrapped (`fully_shard` wraps none)."""
    return any(isinstance(module, StateDictMethods) for module in model.modules())


def _originals(model: nn.Module) -> Originals:
    return Originals(model, as_dtensors=not is_wrapped(model))


def _kind(model: nn.Module, options: StateDictOptions, everywhere: bool = False) -> Any:
    offload = options.cpu_offload
    if not options.full_state_dict:
        configs = ShardedStateDictConfig(offload), ShardedOptimStateDictConfig(offload)
        return StateDictMethods.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs)
    of_model = FullStateDictConfig(offload, rank0_only=offload and not everywhere)
    return StateDictMethods.state_dict_type(model, StateDictType.FULL_STATE_DICT, of_model)


def _frozen_names(model: nn.Module) -> set[str]:
    """Returns every name of every parameter that needs no gradient."""
    owned = owned_places(units_in(model).values())
    entries = named(model, params, all_names=True)
    sources = ((name, owned[place].source if place in owned else param) for name, place, param in entries)
    return {name for name, source in sources if source is not None and not source.requires_grad}


def by_own_names(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict by the names that `load_state_dict` takes, which compiled modules have."""
    prefixes = (clean_fqn(f"{name}.").lstrip(".") for name, _ in walk(model, all_names=True))
    here = {uncompiled_fqn(prefix): prefix for prefix in prefixes}
    cut = ((name.rfind(".") + 1, name) for name in map(uncompiled_fqn, state_dict))
    names = (here.get(name[:end], name[:end]) + name[end:] for end, name in cut)
    return dict(zip(names, state_dict.values()))


def _without_others(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state dict without the parameters that the model does not have."""
    own, groups = _originals(model).by_name, given["param_groups"]
    others = {name for group in groups for name in group["params"] if uncompiled_fqn(name) not in own}
    state = {name: entry for name, entry in given["state"].items() if name not in others}
    cut = [{**group, "params": [n for n in group["params"] if n not in others]} for group in groups]
    return {"state": state, "param_groups": cut}


def _selected(state: Mapping[str, Any], options: Any) -> dict[str, Any]:
    return {
        name if options.keep_submodule_prefixes else name[len(prefix) :]: value
        for prefix in options.submodule_prefixes
        for name, value in state.items()
        if name.startswith(prefix)
    }


def _from_first_rank(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcasts the first rank's tensors; each rank keeps only its pieces. Collective."""
    owned = {name: original for name, original in Originals(model).by_name.items() if original.owned}
    first = FirstRank(model)
    result: dict[str, Any] = {}
    for name, announced in first.announced(dict(state_dict or {})).items():
        value, original = first.fetched(announced), owned.get(uncompiled_fqn(name))
        if original is not None and isinstance(value, torch.Tensor) and value.shape == original.shape:
            value = original.piece_of(value)
        result[name] = value
    return result


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    flat = {f"state.{n}.{key}": value for n, entry in given["state"].items() for key, value in entry.items()}
    for group in given["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": group[key] for key in group if key != "params"})
    return flat


def _unflattened(model: nn.Module, flat: Mapping[str, Any]) -> dict[str, Any]:
    names = _originals(model).by_name
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in flat.items():
        part, _, rest = path.partition(".")
        name = next((prefix for prefix in accumulate(rest.split("."), joined) if prefix in names), None)
        if part not in parts or name in (None, rest):
            raise ValueError(
                f"'{path}' names no parameter of the model: flattened optimizer state has entries "
                "state.<parameter>.<kind> and param_groups.<parameter>.<option>"
            )
        parts[part].setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups = [{**options, "params": [name]} for name, options in parts["param_groups"].items()]
    return {"state": parts["state"], "param_groups": groups}
