"""Functions for which torch chooses a fused kernel by the device.

On the meta device it would compose them of operators that need far more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_wrap._core.torch_private import efficient_attention, flash_attention, flash_attention_on_cpu

_HALF = (torch.bfloat16, torch.float16)


def attention(
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Computes attention by a fused kernel where torch would; else returns None."""
    if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    three, half = (query, key, value), query.dtype in _HALF
    result: Any = None
    if device_type == "cpu":
        if not dropout_p and not enable_gqa and query.shape[-1] == value.shape[-1]:
            result = flash_attention_on_cpu(*three, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    elif attn_mask is None and half and query.shape[-1] <= 256:
        result = flash_attention(*three, dropout_p, is_causal, False, scale=scale)
    elif not enable_gqa:
        if attn_mask is not None:
            mask = (
                torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
            )
            attn_mask = mask.expand(*query.shape[:3], key.shape[2])
        result = efficient_attention(*three, attn_mask, True, dropout_p, is_causal, scale=scale)
    return None if result is None else result[0]


class _RmsNorm(torch.autograd.Function):
    """Allocates, reads and writes as much as the fused kernel: the result, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scales = rows.new_empty((*rows.shape[: rows.dim() - weight.dim()], 1), dtype=torch.float32)
        ctx.save_for_backward(rows, weight, scales)
        return rows * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        return grad * rows, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


def rms_norm(
    device_type: str,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor | None:
    """Normalises in one kernel, where torch would; else returns None."""
    if device_type == "cpu" or weight is None or weight.dtype != input.dtype:
        return None
    return _RmsNorm.apply(input, weight)  # type: ignore[no-any-return,no-untyped-call]


KERNELS: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.scaled_dot_product_attention: attention,
    torch.rms_norm: rms_norm,
}
"""By function of torch: its implementation, whose first argument is the type of the device."""
