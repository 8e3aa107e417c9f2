"""Matrices that are stored as int8 with a scale for each row, and one that trains and only travels so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
KEEPS_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.copy_.default,
    aten.as_strided.default,
    aten._to_copy.default,
}


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.abs().amax(1).clamp(min=1e-12) / 127
    return (values / scales[:, None]).round().to(torch.int8), scales.to(torch.float32)


def restored(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.to(dtype) * scales.to(dtype)[:, None]


class Mute(torch.Tensor):
    """Frozen, with a number that is added to all; it tells of which tensors it is made, and nothing else."""

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scales: torch.Tensor, added: torch.Tensor) -> Mute:
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=torch.float64, device=rows.device)

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, added: torch.Tensor) -> None:
        self.rows, self.scales, self.added = rows, scales, added

    @classmethod
    def of(cls, values: torch.Tensor) -> Mute:
        added = values.mean().double()
        return cls(*quantised(values - added), added)

    def values(self) -> torch.Tensor:
        return restored(self.rows, self.scales, torch.float64) + self.added

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["rows", "scales", "added"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Mute:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            kept = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
            return cls(*(func(part, **kept) for part in (first.rows, first.scales, first.added)))
        if func is aten.view.default:
            return cls(first.rows, first.scales, first.added)  # only ever as it is
        if func is aten.slice.Tensor:
            return cls(func(first.rows, *args[1:]), func(first.scales, *args[1:]), first.added)
        if func is aten.copy_.default:
            for name in first.__tensor_flatten__()[0]:
                getattr(first, name).copy_(getattr(args[1], name))
            return first
        plain = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Packed(Mute):
    """It says as well that it is gathered as it is stored; which takes more operators."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0]
        if func is aten.empty_like.default:
            return cls(torch.empty_like(first.rows), torch.empty_like(first.scales), first.added)
        if func is aten.new_zeros.default:
            return cls(first.rows.new_zeros(args[1]), first.scales.new_zeros(args[1][0]), first.added)
        if func is aten.as_strided.default:
            return cls(first.rows[: args[1][0]], first.scales[: args[1][0]], first.added)
        if func is aten.split.Tensor:
            parts = zip(func(first.rows, *args[1:]), func(first.scales, *args[1:]))
            return [cls(rows, scales, first.added) for rows, scales in parts]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.rows, self.scales), self.added

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is None:
            rows, scales = outputs
            return Packed(rows, scales, metadata), tuple(outputs)
        assert out.rows.data_ptr() == outputs[0].data_ptr()


class Rounded(torch.Tensor):
    """A matrix that trains in its own dtype, and is gathered as int8 with a scale for each row."""

    asked: list[tuple[Any, ...]] = []

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )

    def __init__(self, values: torch.Tensor) -> None:
        self.values_ = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Rounded:
        return cls(inner["values_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        unwrapped = tree_map_only(cls, lambda value: value.values_, (args, kwargs or {}))
        out = func(*unwrapped[0], **unwrapped[1])
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(torch.Tensor, cls, out) if func in KEEPS_CLASS else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        self.asked.append((mesh, outer_size, outer_stride, module, mp_policy))
        return quantised(self.values_), "told"

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "told"
        rows, scales = outputs
        full = restored(rows, scales, param_dtype)
        if out is None:
            return full, (*outputs, full)
        out.copy_(full)
