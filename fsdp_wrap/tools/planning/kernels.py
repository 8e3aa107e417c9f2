"""Functions for which torch chooses a fused kernel by the device; floating-point operations of kernels.

On the meta device it would compose them of operators that need far more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry

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


class _WideSoftmax(torch.autograd.Function):
    """Allocates, reads and writes as much as the fused kernel for rows of half of the bits of its result."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.dtype, result = rows.dtype, rows.to(torch.float32)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


def wide_softmax(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Computes a softmax in float32 of rows in half of the bits, as CUDA does in one kernel; else None."""
    softmaxes = (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int)
    if func not in softmaxes or args[2:] != (torch.float32,) or args[0].dtype not in _HALF:
        return None
    return _WideSoftmax.apply(args[0])  # type: ignore[no-any-return,no-untyped-call]


KERNELS: dict[Any, tuple[Any, Callable[..., torch.Tensor | None]]] = {
    F.scaled_dot_product_attention: (torch.ops.aten.scaled_dot_product_attention.default, attention),
    torch.rms_norm: (torch.ops.aten.rms_norm.default, rms_norm),
}
"""By function of torch: its operator, and its implementation, which takes the type of the device first."""


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Counts an operator's floating-point operations by torch's formula, less what causal attention skips."""
    packet = func.overloadpacket
    if "attention_for_cpu" in func._schema.name:  # of the same operations as on CUDA, without a formula
        packet = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    if "attention" not in func._schema.name:
        return int(formula(*args, **kwargs, out_val=result))
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | kwargs
    fused, mask = "scaled_dot_product" in func._schema.name, given.get("custom_mask_type")
    whole = int(formula(*(_heads_alike(args) if fused else args), **kwargs, out_val=result))
    if not given.get("is_causal") and not mask:
        return whole
    place = 2 if fused else 1  # of the dimension of a sequence
    queries = int(given.get("max_q") or given.get("max_seqlen_q") or given["query"].shape[place])
    keys = int(given.get("max_k") or given.get("max_seqlen_k") or given["key"].shape[place])
    return whole * causal_pairs(queries, keys, not fused and mask != 1) // (queries * keys)


def causal_pairs(queries: int, keys: int, from_the_end: bool = False) -> int:
    """Counts the pairs of a query and a key that a causal kernel computes: it leaves out what it would mask.

    The first query sees the first key alone; or, counted from the end, the last query sees all keys.
    """
    square = min(queries, keys)
    others = (keys - square) * queries if from_the_end else (queries - square) * keys
    return square * (square + 1) // 2 + others


def _heads_alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Expands keys and values of attention to the queries' heads, as torch's formula before 2.12 wants it."""
    batches = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]
    heads = max(batch.shape[1] for batch in batches)
    return tuple(
        arg[:, :1].expand(-1, heads, -1, -1) if any(arg is one for one in batches) else arg for arg in args
    )
