"""What parameters were when their unit was made: a few elements of each, for the ranks to compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_wrap._params import Layout

__all__ = ["InitialValues", "Samples", "find_difference", "sample"]

_SAMPLED = 4  # elements of a parameter
_SAMPLED_OF_SHARD = 64
_TOLERANCE = 0.01  # of the largest element: processors need not round alike, and dtypes are coarse

Samples = list[torch.Tensor]
"""Of every segment of a unit, in the order of its parameters; empty where those are on the meta device."""


def sample(segments: Iterable[Iterable[nn.Parameter]]) -> Samples:
    """Takes a few elements of every parameter, given by segment, while it is whole."""
    return [torch.stack([_elements(param) for param in params]) for params in segments]


def _elements(param: nn.Parameter) -> torch.Tensor:
    if param.is_meta or not param.numel():
        return torch.full((_SAMPLED,), math.nan, device=param.device)
    found = _spread(param.detach(), _SAMPLED)
    real = found.abs() if found.is_complex() else found
    return nn.functional.pad(real.to(torch.float32), (0, _SAMPLED - real.numel()))


def _spread(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Some elements that lie evenly apart."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // number)][:number]


class InitialValues:
    """The values that the parameters of a unit began with, unless others were written since.

    Args:
        samples: Of the whole parameters.
        layouts: Of the unit, which hold the same values.
    """

    def __init__(self, samples: Samples, layouts: Sequence[Layout]) -> None:
        self._samples = samples
        self._written = [layout.written() for layout in layouts]
        self._shards = [_of_shard(layout).clone() for layout in layouts]

    def lines(self, layouts: Sequence[Layout]) -> list[str]:
        """Returns a line per parameter: its sampled elements, or nothing where they say nothing.

        Args:
            layouts: Of the unit, as they are now.
        """
        result: list[str] = []
        for values, layout, written, shard in zip(self._samples, layouts, self._written, self._shards):
            known = not values.is_meta and layout.written() == written and _is_same(shard, _of_shard(layout))
            lines = [" ".join(map(repr, each)) for each in values.tolist()] if known else [""] * len(values)
            result += lines
        return result


def _of_shard(layout: Layout) -> torch.Tensor:
    """Elements of a shard: not every way of loading moves a version."""
    return _spread(layout.flat_param.detach(), _SAMPLED_OF_SHARD)


def _is_same(before: torch.Tensor, now: torch.Tensor) -> bool:
    same_kind = before.dtype == now.dtype and before.device == now.device
    return same_kind and (before.is_meta or torch.equal(before, now))


def find_difference(lines: Sequence[str], others: Sequence[str]) -> int | None:
    """Returns the first parameter of which two ranks began with other values; None if there is none."""
    pairs = (([*map(float, one.split())], [*map(float, two.split())]) for one, two in zip(lines, others))
    return next((index for index, (one, two) in enumerate(pairs) if one and two and _differ(one, two)), None)


def _differ(one: Sequence[float], two: Sequence[float]) -> bool:
    known = [pair for pair in zip(one, two) if all(map(math.isfinite, pair))]
    most = max((max(map(abs, pair)) for pair in known), default=0.0)
    return any(abs(a - b) > _TOLERANCE * most for a, b in known)
