"""Optimizer state of models that are made of `DTensor`s: by name, taken and put back without communication.

Torch's functions for it step an optimizer that was never stepped, and refuse trainable parameters that never
had a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_wrap._modules import clean_fqn
from fsdp_wrap._optim_params import options_of, params_by_key

__all__ = ["cut_for", "taken_of"]

_COMPILED = "_orig_mod."


def taken_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns an optimizer's state by names of parameters; values are the optimizer's own.

    Raises:
        ValueError: If it has parameters that are not the model's.
    """
    names, saved = _names(model), optim.state_dict()
    named = {key: _name(names, each) for keys in params_by_key(optim, saved) for key, each in zip(*keys)}
    state = {named.get(key, key): dict(entry) for key, entry in saved["state"].items()}
    groups = [
        {**copy.deepcopy(options_of(group)), "params": [named[key] for key in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def cut_for(model: nn.Module, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns of a state dict by names what an optimizer's `load_state_dict` takes; nothing is changed.

    Parameters without state there have none: they had no gradient yet, or were frozen.

    Raises:
        ValueError: If the optimizer has parameters that are not the model's, or a group's were saved in
            groups with other options.
    """
    names, now = _names(model), optim.state_dict()
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, (keys, params) in zip(now["param_groups"], params_by_key(optim, now)):
        named = [_name(names, param) for param in params]
        found = {key: state_dict["state"].get(name) for key, name in zip(keys, named)}
        state.update({key: entry for key, entry in found.items() if entry})
        groups.append({**_options(group, named, state_dict["param_groups"]), "params": keys})
    return {"state": state, "param_groups": groups}


def _options(group: Mapping[str, Any], names: list[str], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the options that a group's parameters were saved with; its own where they were not."""
    own = options_of(group)
    alike = [options_of(each) for each in saved if set(names) & set(each["params"])]
    if not alike:
        return own
    for each in alike[1:]:
        if not _same(alike[0], each):
            raise ValueError(
                f"parameters of one group of the optimizer ({', '.join(names[:4])}, ...) were saved in "
                "groups with other options; make groups as they were"
            )
    kept = {key: value for key, value in own.items() if key == "param_names"}
    return {**alike[0], **kept}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return (
            torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
        )

    keys = (one.keys() | other.keys()) - {"param_names"}
    return all(key in one and key in other and same(one[key], other[key]) for key in keys)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(param): clean_fqn(name).replace(_COMPILED, "") for name, param in model.named_parameters()}


def _name(names: Mapping[int, str], param: torch.Tensor) -> str:
    name = names.get(id(param))
    if name is None:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not one of the model's: "
            "make it from the model's parameters() after sharding"
        )
    return name
