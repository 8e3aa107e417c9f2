"""Names the units behind autograd's error that a backward was to read freed parameters.

A gradient that enters a unit, but by none of its outputs, calls no hook, so nothing gathers the parameters.
Autograd then refuses them by the version that freed leaves have. It tells only the caller of the backward:
so torch's call of its engine is rebound, once in a process.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from functools import cache, wraps
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._params import FREED_VERSION, Where
from fsdp_wrap._runtime import Step, Unit

_SAYS = f"is at version {FREED_VERSION}"
_SHAPE = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\]")
_RULE = (
    "A gradient has entered {} on rank {} by none of its outputs, when its parameters were sharded: by a "
    "tensor that its forward computed and did not return, as an attribute, a list or a hook keeps it. Return "
    "the tensor from the forward, in a tuple, dict or dataclass; or make a unit of the module that returns "
    "it; or keep the unit from resharding after forward (SHARD_GRAD_OP, reshard_after_forward=False)"
)

_steps: weakref.WeakKeyDictionary[Step, None] = weakref.WeakKeyDictionary()  # the newest last


def tell_of_freed(step: Step) -> None:
    """Names units of a tree in autograd's errors from now on."""
    _steps[step] = None
    _rebind()


@cache
def _rebind() -> None:
    name = "_engine_run_backward"
    setattr(torch.autograd, name, _telling(getattr(torch.autograd, name)))


def _telling(execute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(execute)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return execute(*args, **kwargs)
        except RuntimeError as error:
            message = str(error)
            told_within = "by none of its outputs" in message  # by a backward inside this one
            if _SAYS in message and not told_within:
                error.args = (f"{message}\n{_RULE.format(_candidates(message), dist.get_rank())}",)
            raise

    return told


def _candidates(message: str) -> str:
    """Names the units that may be meant, first the one that ran last: a backward comes to it first.

    They have freed parameters, one of the size that autograd tells if any has.
    """
    shape = _SHAPE.search(message)
    numel = prod(map(int, filter(None, shape[1].split(", ")))) if shape else None
    ran = [unit for step in reversed([*_steps.keys()]) for unit in reversed(step.queue.order.ended)]
    freed = [unit for unit in dict.fromkeys(ran) if unit.buffers.where is Where.SHARDED]
    fits = [unit for unit in freed if numel in _sizes(unit)] or freed
    names = [*dict.fromkeys(unit.name for unit in fits)] or ["a unit"]
    return f"{names[0]}, or another of {len(names)} units," if len(names) > 1 else names[0]


def _sizes(unit: Unit) -> set[int]:
    return {leaf.numel() for segment in unit.segments for leaf in segment.leaves}
