"""Gradient clipping by the total norm, and gradient norms by name, for both front-ends."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fsdp_wrap._checks import refuse_unsharded
from fsdp_wrap._state import GradientNorms, clip_parameters, norms_of

__all__ = ["GradientNorms", "clip_grad_norm_", "grad_norms"]


def clip_grad_norm_(
    model_or_parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients so that their total norm over all ranks is at most `max_norm`.

    Collective: one all-reduce of a number, and one more for each mesh dimension over which tensor
    parallelism cuts parameters. With a model, no operator runs on a `DTensor`, and the placement of gradients
    is looked up once. `torch.nn.utils.clip_grad_norm_` takes longer, and refuses `DTensor`s of several
    meshes.

    Args:
        model_or_parameters: A model (wrapped, sharded by `fully_shard`, or neither), or parameters. Gradients
            of parameters must be `DTensor`s, or the same on all ranks.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is not finite; otherwise all gradients are scaled by it.
        foreach: Accepted without effect: multi-tensor kernels are chosen by themselves.

    Returns:
        The total norm before clipping: 0-d, the same on all ranks, in the widest dtype of the gradients.

    Raises:
        ValueError: If `norm_type` is not positive or `max_norm` negative.
        RuntimeError: If the norm is not finite and `error_if_nonfinite` is True. With a model also inside
            its forward or backward, or if another unit encloses it.
    """
    if not isinstance(model_or_parameters, nn.Module):
        return clip_parameters(model_or_parameters, max_norm, norm_type, error_if_nonfinite)
    norms = norms_of(model_or_parameters)
    if norms is None:
        return clip_parameters(model_or_parameters.parameters(), max_norm, norm_type, error_if_nonfinite)
    return norms.clip(max_norm, norm_type, error_if_nonfinite)


def grad_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
    """Returns the norm of each parameter's gradient over all ranks, without unsharding.

    Collective, with the all-reduces of `clip_grad_norm_`.

    Args:
        model: A model, wrapped or sharded by `fully_shard`.
        norm_type: The `norm_type` of `clip_grad_norm_`.

    Returns:
        0-d tensors by the names, and in the order, of the unwrapped model's `named_parameters()`. Parameters
        without a gradient are left out.

    Raises:
        TypeError: If `model` is no module.
        ValueError: If no module in it is wrapped or sharded, or `norm_type` is not positive.
        RuntimeError: Inside a forward, a backward or `summon_full_params`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"grad_norms takes a model, not a {type(model).__name__}")
    norms = norms_of(model)
    if norms is None:
        refuse_unsharded(model, "grad_norms()")
    return norms.by_name(norm_type)
