"""Gradient clipping by the norm over all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

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
    sharded = _sharded_grads(units)
    known = {id(grad) for grad in sharded}
    replicated = [p.grad for p in module.parameters() if p.grad is not None and id(p.grad) not in known]
    total = _total_norm(sharded, replicated, float(norm_type), units)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in [*sharded, *replicated]:
        grad.detach().mul_(scale.to(grad.device, grad.dtype))
    return total


def _sharded_grads(units: list[Unit]) -> list[torch.Tensor]:
    handles = [unit.handle for unit in units if unit.handle is not None]
    holders = {id(p): p for handle in handles for segment in handle.segments for p in segment.layout.sources}
    return [param.grad for param in holders.values() if param.grad is not None and param.grad.numel() > 0]


def _total_norm(
    sharded: list[torch.Tensor], replicated: list[torch.Tensor], p: float, units: list[Unit]
) -> torch.Tensor:
    handle = next((unit.handle for unit in units if unit.handle is not None), None)
    device = torch.device("cpu") if handle is None else handle.communicator.device
    largest = math.isinf(p)
    part = _reduce_norms(sharded, p, device)
    if handle is not None:
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        handle.communicator.all_reduce(part, op)
    rest = _reduce_norms(replicated, p, device)
    return torch.maximum(part, rest) if largest else (part + rest) ** (1.0 / p)


def _reduce_norms(grads: list[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Returns the largest norm for infinite p, else the sum of the norms to the power of p."""
    if not grads:
        return torch.zeros((), device=device)
    dtype = torch.promote_types(torch.float32, max((g.dtype for g in grads), key=lambda d: d.itemsize))
    norms = torch.stack(torch._foreach_norm(grads, p, dtype=dtype)).to(device)
    return norms.max() if math.isinf(p) else (norms**p).sum()
