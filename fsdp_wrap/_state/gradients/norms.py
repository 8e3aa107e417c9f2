"""Norms of tensors of which each rank holds pieces.

Each rank takes the norm of its own pieces to the power of p, and the sums travel. Where a group holds several
copies of a tensor, each rank's part is divided by their number, so that one all-reduce counts every element
once. An infinite p needs maxima in place of sums, and no division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._comm import Communicator, accelerator_of
from fsdp_wrap._core.torch_private import foreach_mul_, foreach_norm, number_of_dispatch_modes
from fsdp_wrap._state.gradients.held import Over

AllReduce = Callable[[torch.Tensor, Any], object]


class Summand(NamedTuple):
    """This rank's parts of tensors, all-reduces over the ranks that hold the rest, and the copies there."""

    tensors: Sequence[torch.Tensor]
    all_reduces: Sequence[AllReduce]
    copies: int = 1


ExactPower = Callable[[Sequence[Summand], float, torch.device], torch.Tensor]
"""Returns, as `power` does, the power of a norm over all ranks, which no order of sums changes."""

exact_powers: MutableMapping[torch.Tensor, ExactPower] = WeakIdKeyDictionary()
"""How norms are taken of the gradients of reproducible models, by sharded parameter."""

_ROW = 2**16
"""How many elements the host adds in a row; more would lose digits in float32, and take longer in float64."""

_SMALL = 2**12
"""Up to so many elements, copying a tensor beside others costs less than a kernel of its own."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the real dtype in which gradients of some dtype are summed and scaled."""
    return torch.float64 if dtype.to_real() == torch.float64 else torch.float32


def checked_norm(norm_type: float) -> float:
    """Returns the p of a p-norm."""
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be positive, but is {norm_type}: it is the p of the p-norm")
    return p


def checked_bound(max_norm: float) -> float:
    """Returns the upper bound of a norm."""
    bound = float(max_norm)
    if not bound >= 0:
        raise ValueError(f"max_norm must not be negative, but is {max_norm}")
    return bound


def check_finite(total: torch.Tensor, p: float) -> None:
    """Refuses a total norm that is not finite."""
    if not math.isfinite(total.item()):
        raise RuntimeError(
            f"the total norm of order {p} of the gradients is {total.item()}, so they cannot be clipped; "
            "leave out error_if_nonfinite=True to scale them nevertheless"
        )


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors for the kernels that take many at once: those of one dtype on one device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return [*kinds.values()]


def power(kinds: Iterable[Sequence[torch.Tensor]], p: float, device: torch.device) -> torch.Tensor:
    """Returns the p-norm of all elements to the power of p, or for infinite p that norm; zero for none.

    Args:
        kinds: Tensors from `by_kind`, none of them empty.
        p: Positive.
        device: Where the result is to be: float64, 1-D, of one element.
    """
    norms = []
    for kind in kinds:
        # Other powers take no faster way, and their sums leave the range of float32 more easily. On the host
        # neither do sums of absolute values, of which a row of float32 loses a digit.
        fast = p in (2.0, math.inf) or (p == 1.0 and not kind[0].is_cpu)
        wide = accumulation_dtype(kind[0].dtype) if fast else torch.float64
        wide = wide.to_complex() if kind[0].is_complex() else wide
        of_kind = torch.stack(foreach_norm(_rows(kind), p, dtype=wide)).to(device, torch.float64)
        norms.append(of_kind if math.isinf(p) else of_kind**p)
    return merged(norms or [torch.zeros(1, dtype=torch.float64, device=device)], p)


def powers_and_presence(
    pieces: Sequence[torch.Tensor | None], p: float, device: torch.device
) -> torch.Tensor:
    """Returns the power of each gradient's norm, and then for each 1 if it is there, else 0."""
    powers = [power([] if piece is None or not piece.numel() else [[piece]], p, device) for piece in pieces]
    present = [piece is not None for piece in pieces]
    return torch.cat([*powers, torch.tensor(present, dtype=torch.float64, device=device)])


def _rows(kind: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cuts and joins tensors to what a kernel takes at once."""
    small: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    for tensor in kind:
        (small if tensor.numel() <= _SMALL else rows).append(tensor)
    if small:
        rows.append(_joined([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in small]))
    if not rows[0].is_cpu:
        return rows
    return [
        row
        for tensor in rows
        for row in ([tensor] if tensor.numel() <= _ROW else torch.split(tensor.reshape(-1), _ROW))
    ]


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def merged(powers: list[torch.Tensor], p: float) -> torch.Tensor:
    """Returns the power of the norm of all, given those of parts; 1-D, of one element."""
    every = _joined(powers)
    if every.numel() == 1:
        return every
    return every.amax(0, keepdim=True) if math.isinf(p) else every.sum(0, keepdim=True)


def root(powers: torch.Tensor, p: float) -> torch.Tensor:
    """Returns norms, given their powers."""
    return powers if math.isinf(p) else powers ** (1.0 / p)


def total_power(
    kinds: Mapping[Over, Sequence[Sequence[torch.Tensor]]],
    p: float,
    params: Iterable[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Returns the power of the norm of tensors of which each rank has parts; collective.

    The parts are from `by_kind`, by the ranks that hold the rest; they are gradients of `params`.
    """
    exact = exact_power_of(params)
    if exact is None:
        return merged(over_ranks({over: power(parts, p, device) for over, parts in kinds.items()}, p), p)
    return exact([summand_of(over, chain.from_iterable(parts)) for over, parts in kinds.items()], p, device)


def over_ranks(powers: Mapping[Over, torch.Tensor], p: float) -> list[torch.Tensor]:
    """Reduces 1-D powers over the ranks that hold the rest, at once over the same ranks; keeps the order."""
    together: dict[tuple[Any, ...], list[Over]] = {}
    for over in powers:
        together.setdefault(over[:2], []).append(over)
    totals: dict[Over, torch.Tensor] = {}
    for overs in together.values():
        counted = [
            powers[over] if math.isinf(p) or over.copies == 1 else powers[over] / over.copies
            for over in overs
        ]
        total = _joined(counted)
        for all_reduce in all_reduces_over(overs[0]):
            total = reduced(total, p, all_reduce)
        totals |= zip(overs, total.split_with_sizes([part.numel() for part in counted]))
    return [totals[over] for over in powers]


def summand_of(over: Over, parts: Iterable[torch.Tensor]) -> Summand:
    """Returns this rank's parts of tensors as a summand of their norm over all ranks."""
    return Summand([part for part in parts if part.numel()], all_reduces_over(over), over.copies)


def all_reduces_over(over: Over) -> list[AllReduce]:
    """Returns functions that reduce a tensor over the ranks that hold the rest, one after the other."""
    all_reduces = [] if over.group is None else [_sums_over(over.group)]
    if over.mesh is not None:
        mesh, dims = over.mesh
        all_reduces += [partial(dist.all_reduce, group=mesh.get_group(dim)) for dim in dims]
    return all_reduces


def exact_power_of(params: Iterable[torch.Tensor]) -> ExactPower | None:
    """Returns the function that sums powers of a reproducible model exactly; None for other models."""
    exact = (exact_powers[param] for param in params if param in exact_powers)
    return next(exact, None) if exact_powers else None  # does not ask each parameter where there are none


def _sums_over(group: Communicator) -> AllReduce:
    """Returns a function that reduces a tensor over a group in place, and waits."""

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        group.all_reduce([tensor], op).wait()

    return all_reduce


def reduced(values: torch.Tensor, p: float, all_reduce: AllReduce) -> torch.Tensor:
    """Merges powers over ranks, all of which get the same.

    Args:
        values: The powers.
        p: The order of the norms.
        all_reduce: Changes a tensor in place to the ranks' sum, or what another operation makes of them.
    """
    if not math.isinf(p):
        all_reduce(values, dist.ReduceOp.SUM)
        return values
    # Backends drop a NaN from a maximum, or not, by the order of the ranks.
    both = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values)])
    all_reduce(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


def scale(kinds: Iterable[list[torch.Tensor]], total: torch.Tensor, bound: float) -> None:
    """Scales gradients, from `by_kind`, of a total norm, which is 0-d, so that it is at most `bound`."""
    factor: float | torch.Tensor
    # Elsewhere, looking would wait for the device; and in a mode, of a plan say, there may be no number.
    if accelerator_of(total.device) is None and not number_of_dispatch_modes():
        factor = bound / (total.item() + 1e-6)
        if factor >= 1.0:
            return
    else:
        factor = torch.clamp(bound / (total + 1e-6), max=1.0)
    for kind in kinds:
        like = torch.empty((), dtype=accumulation_dtype(kind[0].dtype), device=kind[0].device)
        foreach_mul_(kind, like.fill_(factor))
