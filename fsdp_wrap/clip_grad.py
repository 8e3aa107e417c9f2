"""Gradient clipping by the norm over all ranks."""

from __future__ import annotations

import functools
import math

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in

__all__ = ["clip_grad_norm"]


def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales all gradients of a wrapped module so that their total norm is at most `max_norm`.

    One collective. Gradients of parameters that no unit owns must be the same on all ranks.

    Args:
        module: The root wrapper.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm.

    Returns:
        The total norm before clipping, a 0-d tensor.

    Raises:
        RuntimeError: Inside a forward or backward.
        ValueError: If `norm_type` is not positive.
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type must be positive, not {norm_type}")
    units = list(units_in(module).values())
    for unit in units:
        schedule_of(unit).require_idle("clip_grad_norm_()")
    by_group = _sharded_grads(units)
    sharded = [grad for grads in by_group.values() for grad in grads]
    known = {id(grad) for grad in sharded}
    replicated = [p.grad for p in module.parameters() if p.grad is not None and id(p.grad) not in known]
    total = _total_norm(by_group, replicated, float(norm_type)).to(_dtype(units))
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in [*sharded, *replicated]:
        grad.detach().mul_(scale.to(grad.device, grad.dtype))
    return total


def _dtype(units: list[Unit]) -> torch.dtype:
    # From the parameters, not the gradients, of which this rank may have none.
    handles = [unit.handle for unit in units if unit.handle is not None]
    dtypes = [segment.layout.dtype for handle in handles for segment in handle.segments if segment.trainable]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _sharded_grads(units: list[Unit]) -> dict[Communicator, list[torch.Tensor]]:
    """Returns the gradients' pieces on this rank by the ranks that hold the other pieces."""
    result: dict[Communicator, list[torch.Tensor]] = {}
    for handle in (unit.handle for unit in units if unit.handle is not None):
        holders = {id(p): p for segment in handle.segments for p in segment.layout.sources}
        grads = (param.grad for param in holders.values() if param.grad is not None)
        result.setdefault(handle.communicator, []).extend(grad for grad in grads if grad.numel() > 0)
    return result


def _total_norm(
    by_group: dict[Communicator, list[torch.Tensor]], replicated: list[torch.Tensor], p: float
) -> torch.Tensor:
    device = next((communicator.device for communicator in by_group), torch.device("cpu"))
    largest = math.isinf(p)
    parts = [_reduce_norms(replicated, p, device)]
    for communicator, grads in by_group.items():
        part = _reduce_norms(grads, p, device)
        communicator.all_reduce([part], dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM).wait()
        parts.append(part)
    stacked = torch.stack(parts)
    return stacked.max() if largest else stacked.sum() ** (1.0 / p)


def _reduce_norms(grads: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Returns the largest norm for infinite p, else the sum of the norms to the power of p."""
    if not grads:
        return torch.zeros((), device=device, dtype=torch.float64)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = torch.stack(torch._foreach_norm(grads, p, dtype=wide)).to(device, torch.float64)
    return norms.max() if math.isinf(p) else (norms**p).sum()
