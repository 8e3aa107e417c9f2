"""States of optimizers: by the names of a plain module, compared, loaded."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import IntervalTensor


def by_name(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Returns a plain optimizer's state dict with names in place of numbers."""
    names = {id(param): name for name, param in module.named_parameters()}
    numbered = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    state = copy.deepcopy(optimizer.state_dict())
    groups = [{**group, "params": [numbered[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbered[n]: entry for n, entry in state["state"].items()}, "param_groups": groups}


def assert_same(actual: dict[str, Any], expected: dict[str, Any], check_dtype: bool = True) -> None:
    assert sorted(actual["state"]) == sorted(expected["state"])
    for name, entry in expected["state"].items():
        assert list(actual["state"][name]) == list(entry), name
        for key, value in entry.items():
            other = actual["state"][name][key]
            if not isinstance(value, torch.Tensor):
                assert other == value, (name, key)
                continue
            other = other.full_tensor() if isinstance(other, IntervalTensor) else other
            assert other.shape == value.shape, (name, key)
            torch.testing.assert_close(other, value, rtol=0, atol=1e-12, check_dtype=check_dtype)
    assert len(actual["param_groups"]) == len(expected["param_groups"])
    for group, other in zip(actual["param_groups"], expected["param_groups"]):
        assert sorted(group["params"]) == sorted(other["params"])
        assert {**group, "params": 0} == {**other, "params": 0}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))


def grouped(module: nn.Module, split: Callable[[str], bool]) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    first = [param for name, param in named if split(name)]
    rest = [param for name, param in named if not split(name)]
    return torch.optim.AdamW([{"params": rest, "lr": 1e-3}, {"params": first, "weight_decay": 0.5}], lr=1e-2)
