"""Clipping of the gradients of any parameters, `DTensor`s on any meshes among them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from fsdp_wrap._params import held_by_this_rank
from fsdp_wrap._state.gradients.held import Over
from fsdp_wrap._state.gradients.norms import by_kind, merged, power, reduced, root, scale


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, whatever meshes they lie on.

    That of `torch.nn.utils` refuses `DTensor`s of several meshes, as those of a model are of which tensor
    parallelism has distributed a part. Collective over the ranks of all meshes: one all-reduce of a number
    for each dimension over which parameters are cut.

    Args:
        parameters: Of `fully_shard`, or any whose gradients are `DTensor`s or the same on all ranks.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm.
        error_if_nonfinite: Refuse a norm that is not finite; else all gradients are scaled by it.
        foreach: Accepted: what kernels take at once is found out here.

    Returns:
        The total norm before clipping: 0-d, the same on all ranks, in the widest dtype of the gradients.

    Raises:
        ValueError: If `norm_type` is not positive or `max_norm` negative.
        RuntimeError: If the norm is not finite and that is to be refused.
    """
    p, bound = float(norm_type), float(max_norm)
    if not p > 0:
        raise ValueError(f"norm_type must be positive, but is {norm_type}: it is the p of the p-norm")
    if not bound >= 0:
        raise ValueError(f"max_norm must not be negative, but is {max_norm}")
    params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    by_ranks: dict[Over, list[torch.Tensor]] = {}
    for grad in grads:
        by_ranks.setdefault(_over(grad), []).append(held_by_this_rank(grad))
    device = held_by_this_rank(grads[0]).device
    powers = [power_over(over, parts, p, device) for over, parts in by_ranks.items()]
    total = root(merged(powers, p), p).squeeze(0)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped; leave out error_if_nonfinite=True to scale them nevertheless"
        )
    parts = [part for each in by_ranks.values() for part in each if part.numel()]
    scale(by_kind(parts), total, bound)
    dtype = grads[0].dtype
    for grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype)
    return total.to(dtype)


def _over(grad: torch.Tensor) -> Over:
    if not isinstance(grad, DTensor):
        return None, None
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} has placements {grad.placements}: each rank has a "
            "summand of it, of which no norm can be taken; redistribute it first"
        )
    cut = [dim for dim, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    return None, (grad.device_mesh, tuple(cut))


def power_over(over: Over, parts: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Returns the norm of tensors of which this rank has parts, to the power of p; collective."""
    return summed_over(over, power(by_kind(part for part in parts if part.numel()), p, device), p)


def summed_over(over: Over, found: torch.Tensor, p: float) -> torch.Tensor:
    """Merges powers of norms over the ranks that hold the rest; collective."""
    communicator, mesh = over
    if communicator is not None:
        found = reduced(found, p, lambda tensor, op: communicator.all_reduce([tensor], op).wait())
    if mesh is not None:
        for dim in mesh[1]:
            found = reduced(found, p, partial(dist.all_reduce, group=mesh[0].get_group(dim)))
    return found
