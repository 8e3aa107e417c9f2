"""Checks of calls: on the root, of a sharded model, with the sharded parameters that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import NotRootError, ReplacedError
from fsdp_wrap._params import Segment, ShardedParams, refuse_other_codes
from fsdp_wrap._runtime import Unit


def converted(
    unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor], instead: str
) -> list[tuple[Segment, torch.dtype]]:
    """Returns the segments of a unit, each with the dtype to which a function converts its shard.

    A function that moves a shard to another device is refused; the error ends with the advice `instead`.
    """
    conversions = []
    for segment in unit.segments:
        shard = segment.params.flat_param.data
        before = torch.empty(0, dtype=shard.dtype, device=shard.device)
        after = fn(before)
        if after.device != before.device and not before.is_meta:
            raise ValueError(
                f"the sharded parameters of {unit.name} cannot go from {before.device} to {after.device}; "
                f"{instead}"
            )
        if after.dtype != before.dtype:
            refuse_other_codes(segment.params.side_data, after.dtype, unit.name_of)
        conversions.append((segment, after.dtype))
    return conversions


def refuse_replaced(unit: Unit, sharded: ShardedParams) -> None:
    """Refuses sharded parameters that users have replaced or removed."""
    for fqn, replacement in sharded.display.replaced():
        what = "was removed" if replacement is None else f"was replaced by {_described(replacement)}"
        raise ReplacedError(
            f"the sharded parameter '{unit.name_of(fqn)}' {what} in its "
            f"module on rank {dist.get_rank()}, where optimizer and training would not know of it: put the "
            "former object back, and write new values into it; or replace it before sharding, or, with the "
            "wrapper, inside summon_full_params"
        )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"


def require_root(unit: Unit, doing: str) -> None:
    """Refuses an operation on the whole model if another unit encloses this one."""
    if unit.nested:
        raise NotRootError(f"{doing} must be called on the root, and this is {unit.name}")


def refuse_unsharded(module: nn.Module, doing: str) -> NoReturn:
    """Refuses a model in which nothing is wrapped or sharded."""
    raise ValueError(
        f"{type(module).__name__} has no wrapped or sharded module: call {doing} with the model that has"
    )
