"""Norms of which no order of sums changes a bit.

Numbers are put on a grid of whole multiples of a power of two, which the largest of them on any rank sets,
and are added as integers. A second grid takes what the first one leaves. Each number loses
less than 2 ** -48 of the largest summand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fsdp_wrap._state import AllReduce, Summand, reduced

_STEP = 24
"""Bits of a summand on each grid: so many numbers as 2 ** (62 - 24) can be added."""

_PIECE = 1 << 16
"""How many numbers the host puts on the grids at a time: they stay in its cache."""


def exact_power(summands: Sequence[Summand], p: float, device: torch.device) -> torch.Tensor:
    """Returns the p-norm of tensors of which each rank has parts, to the power of p; collective.

    Args:
        summands: This rank's parts, by the ranks that hold the rest, the same on all ranks.
        p: 1, 2 or infinite.
        device: Where the result is to be: float64, 1-D, of one element.

    Raises:
        ValueError: If `p` is another number.
    """
    if p not in (1.0, 2.0, math.inf):
        raise ValueError(
            f"a reproducible model takes norms of order 1, 2 and inf, not {p}: other powers are rounded "
            "differently by the place of a number in a shard"
        )
    largest = [_over_ranks(_largest(summand.tensors, device), summand.all_reduces) for summand in summands]
    most = torch.cat([torch.zeros(1, dtype=torch.float64, device=device), *largest]).amax(0, keepdim=True)
    if math.isinf(p):
        return most
    usable = most.isfinite() & (most > 0)
    unit = torch.where(usable, most / torch.frexp(most).mantissa, 1.0)  # a power of two
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for summand in summands:
        own = _on_grids(summand.tensors, unit, p, device)
        for all_reduce in summand.all_reduces:
            all_reduce(own, dist.ReduceOp.SUM)
        sums += own // summand.copies
    steps = torch.tensor([2.0**-_STEP, 2.0 ** (-2 * _STEP)], dtype=torch.float64, device=device)
    high, low = torch.split(sums.double() * steps, 1)
    return torch.where(most.isfinite(), (high + low) * unit**p, most)


def _largest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the largest absolute value, or NaN if there is one: 1-D, of one element."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for tensor in tensors:
        norms.append(torch.linalg.vector_norm(tensor, math.inf).to(device, torch.float64))
    return torch.stack(norms).amax(0, keepdim=True)


def _over_ranks(most: torch.Tensor, all_reduces: Iterable[AllReduce]) -> torch.Tensor:
    for all_reduce in all_reduces:
        most = reduced(most, math.inf, all_reduce)
    return most


def _on_grids(
    tensors: Iterable[torch.Tensor], unit: torch.Tensor, p: float, device: torch.device
) -> torch.Tensor:
    """Returns the sums of powers of numbers, in units, on both grids."""
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in tensors:
        scale = unit.to(tensor.device)
        pieces = torch.split(tensor.reshape(-1), _PIECE if tensor.is_cpu else max(1, tensor.numel()))
        for piece in pieces:
            powers = piece.abs().double().div_(scale)
            powers = powers.square_() if p == 2.0 else powers
            for grid in range(2):
                whole = powers.mul_(2.0**_STEP).trunc()
                sums[grid] += whole.long().sum().to(device)
                powers.sub_(whole)
    return sums
