"""Hooks on optimizer steps: they count steps, refuse some parameters, and tell of later loads.

Kernels of optimizers do not always move version counters: so steps are counted, and those of fused kernels
noted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core.add_ons import Seam
from fsdp_wrap._core.errors import warn_caller
from fsdp_wrap._core.modules import is_owned

shard_steps: Seam[Callable[..., Any]] = Seam("optimizers", "fsdp_wrap.optim")
"""Takes steps of optimizers over `DTensor`s."""

_ASKED = "_fsdp_asked_in_steps"  # an attribute is fast to look up, for each parameter at each step

_steps = 0
_here = threading.local()  # `counted` where the running thread's steps have been counted
_refused = WeakIdKeyDictionary()  # by parameter: returns a reason against a step, or None
_pieces = WeakIdKeyDictionary()  # by parameter: its `OptimizerPiece`
_tried: WeakKeyDictionary[torch.optim.Optimizer, _Tried] = WeakKeyDictionary()
_watched: WeakSet[torch.optim.Optimizer] = WeakSet()  # whose loads are told of

load_watchers: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called when an optimizer that was seen before has loaded a state dict."""

before_steps: list[Callable[[torch.optim.Optimizer], None]] = []
"""Called when an optimizer is about to step, except in a graph that is compiled, and after `count_step`."""


@dataclass(frozen=True)
class _Tried:
    """Parameters of an optimizer that were tried, and lists of them with their lengths, by id."""

    params: set[int]
    lists: set[tuple[int, int]]


def steps_taken() -> int:
    """Returns how many steps optimizers have taken since `watch_steps`, or are to take (`count_step`)."""
    return _steps


def count_step() -> None:
    """Counts a step that another thread will take, so that all ranks count it at the same place."""
    global _steps
    _steps += 1


@contextmanager
def counted_before() -> Iterator[None]:
    """Counts no steps of this thread while the context is open: `count_step` has."""
    _here.counted = True
    try:
        yield
    finally:
        _here.counted = False


@functools.cache
def watch_steps() -> None:
    """Registers the hooks: steps are counted and refused, and fused kernels move version counters."""
    register_optimizer_step_pre_hook(_refuse)
    register_optimizer_step_post_hook(_note)


@functools.cache
def watch_distributed_steps() -> RemovableHandle:
    """Registers the hook by which the add-on takes steps; it is imported at the first one."""
    return register_optimizer_step_pre_hook(_offer)


def watch_loads(optimizer: torch.optim.Optimizer) -> None:
    """Lets `load_watchers` know of the optimizer's loads; so does its first step."""
    if optimizer not in _watched:
        _watched.add(optimizer)
        with suppress(AttributeError):  # it is one around another, which never calls `__init__`
            optimizer.register_load_state_dict_post_hook(_tell_loaded)


def _tell_loaded(optimizer: torch.optim.Optimizer) -> None:
    for watcher in load_watchers:
        watcher(optimizer)


def _offer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Returns other arguments for a step that the add-on takes."""
    take = None if torch.compiler.is_compiling() else shard_steps.filled
    return take and take(optimizer, args, kwargs)


def refuse_in_steps(param: nn.Parameter, reason: Callable[[], str | None]) -> None:
    """Lets optimizers that hold a parameter raise before they step.

    `reason` returns the end of a sentence about the optimizer, or None where it may step now.
    """
    param.__dict__[_ASKED] = True
    _refused[param] = reason


def refuse_as(param: nn.Parameter, whole: nn.Parameter) -> None:
    """Lets optimizers that hold a parameter raise when those would that hold what it is a piece of."""
    refuse_in_steps(param, lambda: _refused[whole]() if whole in _refused else None)


@dataclass(frozen=True)
class OptimizerPiece:
    """A parameter of an optimizer that is a flat piece of one or several of the model's parameters.

    `name` returns the name of the first of them, `dims` are their numbers of dimensions. `cut` tells whether
    other ranks have the rest; else it is whole, but flat. `reason` returns, for the name, the end of a
    sentence about an optimizer that computes with whole parameters, and so cannot step.
    """

    name: Callable[[], str]
    dims: tuple[int, ...]
    cut: bool
    reason: Callable[[str], str]


sees_wholes: Seam[Callable[[torch.optim.Optimizer, dict[str, Any], Sequence[OptimizerPiece]], bool]] = Seam(
    "optimizers", "fsdp_wrap.optim"
)
"""Tells whether an optimizer computes with whole parameters, given one of its groups and the pieces there."""


def note_piece(param: nn.Parameter, piece: OptimizerPiece) -> None:
    """Lets optimizers that hold a piece raise, before their first step, if they compute with wholes."""
    _pieces[param] = piece


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _try_once(optimizer)
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if _ASKED in param.__dict__ and param in _refused:  # others have copied the attribute
            if (reason := _refused[param]()) is not None:
                raise RuntimeError(f"this {type(optimizer).__name__} {reason}")
    if not torch.compiler.is_compiling() and not getattr(_here, "counted", False):
        for watcher in before_steps:
            watcher(optimizer)


def reason_against_pieces(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why an optimizer cannot step with its pieces, as the end of a sentence; None if it can.

    Each parameter is looked at once, with all that are in its group then. An optimizer that is not torch's is
    tried, which draws from the process's generators and puts them back: call this where nothing runs beside
    it. Without the add-on for optimizers nothing is found.
    """
    tried = _tried.setdefault(optimizer, _Tried(set(), set()))
    for group in optimizer.param_groups:
        params: list[nn.Parameter] = group["params"]
        pieces = [_pieces[param] for param in params if id(param) not in tried.params and param in _pieces]
        if pieces and sees_wholes.filled is not None and sees_wholes.filled(optimizer, group, pieces):
            return str(pieces[0].reason(pieces[0].name()))
        tried.params.update(map(id, params))
        tried.lists.add((id(params), len(params)))
    return None


def _try_once(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that has pieces and computes with whole parameters."""
    if torch.compiler.is_compiling():
        return
    lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
    if optimizer in _tried and _tried[optimizer].lists.issuperset(lists):
        return
    if (reason := reason_against_pieces(optimizer)) is not None:
        raise RuntimeError(f"this {type(optimizer).__name__} {reason}")
    watch_loads(optimizer)
    warn_of_lost_decay(optimizer)


def warn_of_lost_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warns if groups look as if they were made by `p.ndim >= 2` of pieces, which are flat.

    Then no group with weight decay has a piece of a matrix, and groups without it have all pieces.
    """
    decayed: list[nn.Parameter] = []
    spared: list[OptimizerPiece] = []
    for group in optimizer.param_groups:
        if group.get("weight_decay"):
            decayed.extend(group["params"])
        elif "weight_decay" in group:
            spared.extend(_pieces[param] for param in group["params"] if param in _pieces)
    matrix = next((piece for piece in spared if max(piece.dims) > 1), None)
    only_matrices = all(min(piece.dims) > 1 for piece in spared)
    some_decay = any(group.get("weight_decay") for group in optimizer.param_groups)
    if matrix is None or not some_decay or any(p in _pieces for p in decayed) or (decayed and only_matrices):
        return
    warn_caller(
        f"weight decay may be lost: this {type(optimizer).__name__} has '{matrix.name()}' in a group without "
        "it, and no sharded parameter in one with it. Sharded parameters are flat, so p.ndim does not tell "
        "matrices from the rest. Make the groups of the module's parameters before wrapping, and wrap with "
        "use_orig_params=True, which keeps these objects; or go by names"
    )


def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(_here, "counted", False):
        count_step()
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version(
                [param for param in group["params"] if param.grad is not None and is_owned(param)]
            )
