"""`stochastic_rounding`: steps in float32, after which bfloat16 parameters are rounded by chance."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import check_kind
from fsdp_wrap._params import to_local
from fsdp_wrap._state import Originals, placed_like
from fsdp_wrap.optim._on_shards import (
    AnyOptimizer,
    as_placed,
    check_elementwise,
    stepping_within,
)
from fsdp_wrap.optim._shard_runs import same

_ROUNDING = "_fsdp_rounding"
_SEED, _STEP = "stochastic_rounding_seed", "stochastic_rounding_step"
_AT_ONCE = 1 << 20  # elements, to bound the memory for their draws
_WORD = 0xFFFFFFFF


def stochastic_rounding(optimizer: AnyOptimizer, model: nn.Module, *, seed: int = 0) -> AnyOptimizer:
    """Lets an elementwise optimizer round its updates of bfloat16 parameters stochastically.

    The step is taken in float32, on this rank's parts alone. Then each element becomes one of its two
    neighbours in bfloat16, the nearer the likelier, so that small updates are kept in the mean. The draw
    for an element depends on the seed, the number of the step, the name of its parameter and its index there:
    not on ranks, wrapping or front-end. The numbers are in the groups of the optimizer, and so in its state
    dicts. Parameters of other dtypes are stepped as before. Nothing is communicated, unless a gradient is
    placed otherwise than its parameter.

    State is in float32, as the steps are. A float32 copy of the bfloat16 parts exists while a step runs.

    Args:
        optimizer: Elementwise, as for `on_shards`, which it needs no more. It must not round so itself
            (torchao: `bf16_stochastic_round=False`), and `step` must not have been replaced.
        model: The model whose parameters it has, sharded or not.
        seed: Another one gives other draws.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If it is no `torch.optim.Optimizer`, or `seed` no int.
        ValueError: If it cannot step so, or has parameters that are not the model's, that tensor parallelism
            has distributed, or that are cut along another dimension than the first.

    The rounding is that of Gupta et al., 2015, arXiv:1502.02551.
    """
    check_kind("seed", seed, int, optional=False)
    check_elementwise(optimizer, "stochastic_rounding")
    if _ROUNDING in optimizer.__dict__:
        raise ValueError(f"this {type(optimizer).__name__} rounds stochastically already")
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise ValueError(
            f"this {type(optimizer).__name__} rounds by itself, by draws that depend on the ranks: make it "
            "with bf16_stochastic_round=False"
        )
    _check_params(optimizer, Originals(model))
    optimizer.__dict__[_ROUNDING] = _Rounding(model)
    for group in optimizer.param_groups:
        group[_SEED], group[_STEP] = seed, 0
    optimizer.__class__ = _rounding(type(optimizer))  # type: ignore[arg-type]
    return optimizer


@functools.cache
def _rounding(kind: type[Any]) -> type[Any]:
    """Returns a class like another, whose instances have `_Rounding`."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        with self.__dict__[_ROUNDING].in_float32(self, rounds=False):  # to whose dtype state is cast
            kind.load_state_dict(self, state_dict, *args, **kwargs)

    return stepping_within(kind, _in_float32, load_state_dict=load_state_dict)


def _in_float32(optimizer: Any) -> Any:
    return optimizer.__dict__[_ROUNDING].in_float32(optimizer, rounds=True)


@dataclass(frozen=True)
class _LocalRange:
    """A range of a rank's local elements, all of one parameter."""

    fqn: str
    start: int  # in the parameter
    offset: int  # in the local tensor
    length: int


class _Rounding:
    """The float32 copies of bfloat16 parameters in the steps of one optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: list[Any] = []
        self._places: dict[int, list[_LocalRange]] = {}

    @contextmanager
    def in_float32(self, optimizer: torch.optim.Optimizer, rounds: bool) -> Iterator[None]:
        """Gives an optimizer float32 copies of the bfloat16 shards; `rounds` rounds them back."""
        params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        copies: dict[Any, Any] = {param: _copy_of(param, rounds) for param in params if _is_replaced(param)}
        lists, public = [group["params"] for group in optimizer.param_groups], optimizer.state
        state = {copies.get(key, key): _local_state(key, entry, copies) for key, entry in public.items()}
        optimizer.state = defaultdict(dict, state)
        for group, own in zip(optimizer.param_groups, lists):
            group["params"] = [copies.get(param, param) for param in own]
        try:
            yield
        finally:
            stepped, optimizer.state = optimizer.state, public
            for group, own in zip(optimizer.param_groups, lists):
                group["params"] = own
            owners = {copy: param for param, copy in copies.items()}
            public.clear()
            for key, entry in stepped.items():
                public[owners.get(key, key)] = _placed_state(owners.get(key), entry)
        if rounds:
            self._follow(params)
            for group in optimizer.param_groups:
                group[_STEP] = group.get(_STEP, 0) + 1
                for param in group["params"]:
                    if param in copies and copies[param].grad is not None:
                        self._round(param, copies[param], group.get(_SEED, 0), group[_STEP])
            increment_version([param for param, copy in copies.items() if copy.grad is not None])

    def _follow(self, params: list[Any]) -> None:
        if same(params, self._known):
            return
        self._known, self._places = params, {}
        for original in Originals(self._model).by_name.values():
            interval = original.interval
            if interval.part is None and interval.data.numel():
                offset = 0 if isinstance(original.source, DTensor) else interval.offset
                place = _LocalRange(original.fqn, interval.start, offset, interval.data.numel())
                self._places.setdefault(id(original.source), []).append(place)

    @torch.no_grad()
    def _round(self, param: nn.Parameter, values: torch.Tensor, seed: int, step: int) -> None:
        held, new = to_local(param.detach()).view(-1), values.detach().view(-1)
        places = self._places.get(id(param))
        if places is None:
            held.copy_(new)
            return
        for place in places:
            keys = _keys(seed, step, place.fqn)
            for first in range(0, place.length, _AT_ONCE):
                length = min(_AT_ONCE, place.length - first)
                part = slice(place.offset + first, place.offset + first + length)
                draws = draws_of(keys, place.start + first, length, new.device)
                held[part].copy_(rounded(new[part], draws))


def rounded(values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to bfloat16 by draws: int32, even in [0, 65536). Exact, non-finite values stay."""
    bits = values.contiguous().view(torch.int32)
    up = ((bits + draws) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), up, values).to(torch.bfloat16)


def draws_of(keys: tuple[int, int], start: int, length: int, device: torch.device) -> torch.Tensor:
    """Draws a number in [0, 65536) for each element: int32, a function of keys and index alone."""
    index = torch.arange(start, start + length, dtype=torch.int64, device=device)
    mixed = _mix((index & _WORD) ^ keys[0])
    return (_mix((mixed + (index >> 32)) & _WORD ^ keys[1]) & 0xFFFF).to(torch.int32)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Permutes words of 32 bits, in int64, so that each bit depends on all."""
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


def _keys(seed: int, step: int, fqn: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{step}/{fqn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _check_params(optimizer: torch.optim.Optimizer, names: Originals) -> None:
    for param in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        for original in names.of(param):
            foreign = original.sharded is None and isinstance(param, DTensor)
            if _is_replaced(param) and (foreign or original.interval.part is not None):
                raise ValueError(
                    f"parameter '{original.fqn}' was distributed before it was sharded, as by tensor "
                    "parallelism, so its elements here have no index that stochastic_rounding could draw by: "
                    "keep it in float32, or give its optimizer no stochastic_rounding"
                )


def _is_replaced(param: torch.Tensor) -> bool:
    return param.dtype == torch.bfloat16


def _copy_of(param: Any, with_grad: bool) -> nn.Parameter:
    copied = nn.Parameter(to_local(param.detach()).float(), requires_grad=param.requires_grad)
    if with_grad and param.grad is not None:
        grad = as_placed(param) if isinstance(param, DTensor) else param.grad
        copied.grad = to_local(grad).float()
    return copied


def _local_state(param: Any, entry: Any, copies: Container[Any]) -> Any:
    if param not in copies:
        return entry
    return {key: to_local(value) for key, value in entry.items()}


def _placed_state(param: Any, entry: Any) -> Any:
    """Returns the state of a copy in the parameter's form: `DTensor`s for a `DTensor`."""
    if not isinstance(param, DTensor):
        return entry
    return {key: placed_like(param, key, value) for key, value in entry.items()}
