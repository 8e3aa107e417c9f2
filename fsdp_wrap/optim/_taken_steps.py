"""Steps of torch's own optimizers over `fully_shard`ed parameters, taken on plain shards by themselves.

A hook before steps may give other arguments to a step, and the first of these is the optimizer. So a step
goes on with a stand-in of it, and with a closure that steps the optimizer itself, between all of its hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import shard_steps, watch_distributed_steps
from fsdp_wrap.optim._on_shards import shards_shown_to, without_hooks

_NAMES = "SGD Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop"
_ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}

_are_taken = True


def steps_on_shards(enabled: bool) -> AbstractContextManager[Any]:
    """Sets whether torch's own optimizers step on the plain shards of `fully_shard`ed parameters.

    They do so by themselves: the numbers are the same to the bit, and small models step faster. Parameter
    groups, state and state dicts have `DTensor`s between steps. Left to torch are optimizers whose step is
    not that of torch's class, `differentiable=True`, and groups with `DTensor`s that neither `fully_shard`
    nor `replicate` of this library has made. `on_shards` is for those.

    Args:
        enabled: Whether they do, for all optimizers of this process from the next step on.

    Returns:
        A context manager that sets it back at its end; without `with` the setting stays.
    """
    undo = ExitStack()
    undo.callback(_set, _are_taken)
    _set(enabled)
    return undo


def _set(enabled: bool) -> None:
    global _are_taken
    watch_distributed_steps().remove()
    if enabled:
        watch_distributed_steps.cache_clear()
        watch_distributed_steps()
    _are_taken = enabled


@shard_steps.fill
def take_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns other arguments for a step that is to be taken on shards; None for any other."""
    step = _step_of(type(optimizer))
    if step is None or not _has_dtensors(optimizer.param_groups) or len(args) + len(kwargs) > 2:
        return None
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    stand_in: Any = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)

    def closure() -> Any:
        loss = None if given is None else given()
        with shards_shown_to(optimizer):
            step(optimizer)
        stand_in.param_groups = []  # nothing is left to do
        return loss

    vars(closure)["__wrapped__"] = given  # for hooks that ask for the closure of the user
    return (stand_in, closure), {}


def _step_of(kind: Any) -> Callable[[Any], Any] | None:
    """Returns a class's step, without hooks, if it is that of an optimizer of torch; else None."""
    origin = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    if origin is None or kind._init_group is not origin._init_group:
        return None
    step = without_hooks(kind.step)
    torchs = getattr(step, "__globals__", {}).get("__name__", "").startswith("torch.optim.")
    return step if torchs and step is without_hooks(origin.step) else None


def _has_dtensors(groups: list[dict[str, Any]]) -> bool:
    """Whether groups have `DTensor`s, and none is `differentiable`."""
    kinds = {*map(type, chain.from_iterable(group["params"] for group in groups))}
    return DTensor in kinds and not any(group.get("differentiable") for group in groups)
