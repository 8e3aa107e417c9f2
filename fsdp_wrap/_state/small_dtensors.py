"""State in few bits of parameters that are `DTensor`s: as `small_states` has it, over `DTensor`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_wrap._core import ceil_div
from fsdp_wrap._params import IntervalTensor, holding, to_local
from fsdp_wrap._state.optim_initial import initial_state
from fsdp_wrap._state.small_states import SmallStates, State, is_scale


def taken_from_dtensor(small: SmallStates, param: torch.Tensor, entry: Mapping[str, Any]) -> State:
    """Returns the state of a parameter with values and scales in place of codes.

    Args:
        small: How the optimizer keeps state.
        param: The parameter, a `DTensor` or whole.
        entry: As the optimizer's state dict has it.
    """
    local = {key: _local(value) for key, value in small.as_in_optimizer(entry).items()}
    apart = small.taken_apart(local, to_local(param).shape)
    bounds = _bounds(param)
    found: State = {}
    for key, value in apart.items():
        if not is_scale(key, apart):
            found[key] = _placed(param, key, value)
        elif bounds is not None:
            scales = small.scales_within(param.numel(), *bounds, 0, value)
            found[key] = scales if isinstance(param, DTensor) else scales.piece
    return found


def put_in_dtensor(
    small: SmallStates, optim: torch.optim.Optimizer, param: nn.Parameter, entry: Mapping[str, Any]
) -> State:
    """Undoes `taken_from_dtensor`, for an entry that may come from another cut or optimizer.

    Args:
        small: How the optimizer keeps state.
        optim: The optimizer.
        param: Its parameter.
        entry: State by names; scales are whole.
    """
    held = to_local(param)
    if not held.numel():
        return dict(entry)
    bounds, local = _bounds(param), {}
    for key, value in entry.items():
        if not is_scale(key, entry):
            local[key] = _local(value)
        elif bounds is not None:
            local[key] = torch.empty(held.numel(), device=held.device)
            first, last = (ceil_div(bound, small.block) for bound in bounds)
            piece = IntervalTensor(value.shape, first, value[first:last].to(held.device))
            small.spread(param.numel(), bounds[0], piece, local[key])
    own = nn.Parameter(held.detach(), requires_grad=param.requires_grad)
    groups = [[own for each in group["params"] if each is param] for group in optim.param_groups]
    like = next(found for of_group in initial_state(optim, groups) for found in of_group)
    kept = small.put_together(local, like)
    return {key: _placed(param, key, value) for key, value in kept.items()}


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _placed(param: torch.Tensor, key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _placed(param, name, each) for name, each in value.items()}
    elementwise = isinstance(value, torch.Tensor) and value.shape == to_local(param).shape
    return holding(param, value) if elementwise and key != "step" else value


def _bounds(param: torch.Tensor) -> tuple[int, int] | None:
    """Says which elements of a flattened parameter this rank holds; None where that is no one piece."""
    if not isinstance(param, DTensor):
        return 0, param.numel()
    first, rows = 0, param.shape[0] if param.ndim else 1
    cuts = 0
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or placement.dim != 0 or cuts:
            return None
        cuts += 1
        chunk = -(-rows // param.device_mesh.size(dim))
        first = min(param.device_mesh.get_local_rank(dim) * chunk, rows)
    row = param.shape[1:].numel()
    return first * row, first * row + to_local(param).numel()
