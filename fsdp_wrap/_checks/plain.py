"""Gradients of plain parameters beside sharded ones: what no unit owns, no unit averages."""

from __future__ import annotations

import gc
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import GroupPositions
from fsdp_wrap._core import clean_fqn, is_ignored, is_owned, joined
from fsdp_wrap._params import FlatPiece

_MOST = 16  # parameters that are looked at
_ROWS, _COLUMNS = 256, 4  # elements of a parameter: about so many along its first dimension, and each further
_ORDER = struct.Struct("<I")  # the checksum of the parameters' shapes in their order
_SUMS = struct.Struct("<2f")  # of elements, and of their sizes
_TOLERANCE = 1e-3  # of the sum of sizes

_CURE = (
    "No unit has this parameter, so nobody averages its gradient, and each rank trains a parameter of its "
    "own. Shard or wrap the module around it as well, the whole model last: fully_shard(model), or "
    "FullyShardedDataParallel(model). Or average its gradient before the step. If it is meant to differ "
    "between ranks, pass it as ignored_params (ignored_states of the wrapper) to the unit around it"
)


def plain_params(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns some of an optimizer's parameters with gradients that no unit averages: the first and last."""
    plain = [param for param in params if param.requires_grad and param.numel() and _is_plain(param)]
    return plain if len(plain) <= _MOST else plain[: _MOST // 2] + plain[-_MOST // 2 :]


def _is_plain(param: nn.Parameter) -> bool:
    whole = not isinstance(param, DTensor | FlatPiece) and not is_owned(param) and not is_ignored(param)
    return whole and param.is_floating_point() and param.layout is torch.strided


@dataclass(frozen=True)
class PlainGradients:
    """What this rank has told of the gradients of plain parameters.

    Attributes:
        groups: The ranks that hold a model's parts and replicas.
        params: References to the parameters.
        kind: The optimizer's class, for messages.
        text: The order of the parameters, and the sums of some elements of each gradient.
    """

    groups: Sequence[GroupPositions]
    params: Sequence[ref[nn.Parameter]]
    kind: str
    text: bytes

    def judge(self, texts: Mapping[int, bytes], members: Sequence[int]) -> str | None:
        """Returns the error if a gradient differs between two ranks that have the parameters in one order."""
        told = {rank: _read(text) for rank, text in sorted(texts.items())}
        own, _ = _read(self.text)
        firsts: dict[int, int] = {}
        for rank, (order, sums) in told.items():
            first = firsts.setdefault(order, rank)
            others = told[first][1]
            pairs = enumerate(zip(others, sums))
            index = next((index for index, pair in pairs if _differ(*pair)), None)
            if index is not None and not _are_permuted(others, sums):
                param = self.params[index]() if order == own else None
                return (
                    f"a gradient differs between ranks {members[first]} and {members[rank]}: that of "
                    f"{_name_of(param)}, a parameter of this {self.kind} beside sharded ones. "
                    f"{_CURE}"
                )
        return None


def tell_gradients(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], groups: Sequence[GroupPositions]
) -> PlainGradients:
    """Returns what this rank tells of the gradients of plain parameters."""
    order = zlib.crc32(repr([tuple(param.shape) for param in params]).encode())
    text = _ORDER.pack(order) + b"".join(_SUMS.pack(*_sums_of(param.grad)) for param in params)
    return PlainGradients(groups, [*map(ref, params)], type(optimizer).__name__, text)


def _read(text: bytes) -> tuple[int, list[tuple[float, ...]]]:
    """Returns the order of parameters that a rank has told, and the sums of each gradient."""
    (order,) = _ORDER.unpack_from(text)
    return order, [*_SUMS.iter_unpack(text[_ORDER.size :])]


def _sums_of(grad: torch.Tensor | None) -> tuple[float, float]:
    """Returns the sum of some elements of a gradient, and of their sizes; NaN where nothing can be said."""
    if grad is None or isinstance(grad, DTensor) or grad.layout is not torch.strided:
        return math.nan, math.nan
    bounds = [_ROWS, *[_COLUMNS] * grad.ndim]
    steps = (max(1, size // bound) for size, bound in zip(grad.shape, bounds))
    some = grad.detach()[tuple(slice(None, None, step) for step in steps)].float()
    return some.sum().item(), some.abs().sum().item()


def _differ(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    if not all(map(math.isfinite, (*one, *other))):
        return False
    bound = _TOLERANCE * max(one[1], other[1])
    return abs(one[0] - other[0]) > bound or abs(one[1] - other[1]) > bound


def _are_permuted(some: Sequence[tuple[float, ...]], others: Sequence[tuple[float, ...]]) -> bool:
    """Whether two ranks have the same gradients, of parameters of equal shapes in another order."""
    rows = [sorted(sums for sums in of_rank if all(map(math.isfinite, sums))) for of_rank in (some, others)]
    return len(rows[0]) == len(rows[1]) and not any(map(_differ, *rows))


def _name_of(param: nn.Parameter | None) -> str:
    """Returns a parameter's name in the outermost module that has it, or its shape.

    We do not know that module: we search all objects for it, which takes long.
    """
    if param is None:
        return "a parameter"
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    parents = {
        child: (name, module) for module in modules for name, child in module._modules.items() if child
    }
    holders = (
        (name, holder) for holder in modules for name, own in holder._parameters.items() if own is param
    )
    name, module = next(holders, ("", None))
    seen = set()
    while module in parents and module not in seen:
        seen.add(module)
        prefix, module = parents[module]
        name = joined(prefix, name)
    return f"'{clean_fqn(name)}'" if name else f"one of shape {tuple(param.shape)}"
