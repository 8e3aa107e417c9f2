"""Clipping of the gradients of any parameters, `DTensor`s on any meshes among them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce
from itertools import chain

import torch
import torch.distributed as dist

from fsdp_wrap._params import to_local
from fsdp_wrap._state.gradients.held import Over, over_of
from fsdp_wrap._state.gradients.norms import (
    AllReduce,
    Summand,
    by_kind,
    check_finite,
    checked_bound,
    checked_norm,
    exact_power_of,
    merged,
    power,
    reduced,
    root,
    scale,
    sums_over,
)


@torch.no_grad()
def clip_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, whatever meshes they lie on.

    Collective over the ranks of all meshes: one all-reduce of a number for each dimension over which
    parameters are cut.

    Args:
        parameters: Sharded by `fully_shard`, or with gradients that are `DTensor`s or the same on all ranks.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm.
        error_if_nonfinite: Refuse a norm that is not finite; else all gradients are scaled by it.

    Returns:
        The total norm before clipping: 0-d, the same on all ranks, in the widest dtype of the gradients.

    Raises:
        ValueError: If `norm_type` is not positive or `max_norm` negative.
        RuntimeError: If the norm is not finite and that is to be refused.
    """
    p, bound = checked_norm(norm_type), checked_bound(max_norm)
    params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    by_ranks: dict[Over, list[torch.Tensor]] = {}
    for grad in grads:
        held = by_ranks.setdefault(over_of(grad), [])
        held += [to_local(grad)] if to_local(grad).numel() else []
    device = to_local(grads[0]).device
    exact = exact_power_of(params)
    if exact is None:
        powers = [power_over(over, parts, p, device) for over, parts in by_ranks.items()]
    else:
        summands = [Summand(parts, all_reduces_over(over)) for over, parts in by_ranks.items()]
        powers = [exact(summands, p, device)]
    total = root(merged(powers, p), p).squeeze(0)
    if error_if_nonfinite:
        check_finite(total, p)
    scale(by_kind(chain.from_iterable(by_ranks.values())), total, bound)
    return total.to(reduce(torch.promote_types, {grad.dtype for grad in grads}).to_real())


def power_over(over: Over, parts: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Returns the norm of tensors of which this rank has parts, none empty, to the power of p; collective."""
    return summed_over(over, power(by_kind(parts), p, device), p)


def summed_over(over: Over, found: torch.Tensor, p: float) -> torch.Tensor:
    """Merges powers of norms over the ranks that hold the rest; collective."""
    for all_reduce in all_reduces_over(over):
        found = reduced(found, p, all_reduce)
    return found


def all_reduces_over(over: Over) -> list[AllReduce]:
    """Returns functions that reduce a tensor over the ranks that hold the rest, one after the other."""
    communicator, mesh = over
    found = [] if communicator is None else [sums_over(communicator)]
    if mesh is not None:
        found += [partial(dist.all_reduce, group=mesh[0].get_group(dim)) for dim in mesh[1]]
    return found
