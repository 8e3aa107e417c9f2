"""`Packing`: a frozen subclass with inner tensors as bytes, which can be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import round_up
from fsdp_wrap._params.extensions.methods import is_packable
from fsdp_wrap._params.layout import ALIGNMENT_BYTES

_Inner = tuple[str, torch.dtype, torch.Size]


class Packing:
    """The places of a subclass's inner tensors in bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kind: Any = type(tensor)
        self._context = tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        self.size, self.dtype, self._stride = tensor.size(), tensor.dtype, tensor.stride()
        self._inner = _described(tensor)
        self._starts, end = [], 0
        for _, dtype, shape in self._inner:
            self._starts.append(end)
            end = round_up(end + shape.numel() * dtype.itemsize, ALIGNMENT_BYTES)
        self.nbytes = end

    def fits(self, value: Any) -> bool:
        """Whether a value is of this subclass, with inner tensors of the same shapes and dtypes."""
        as_param = isinstance(value, nn.Parameter) and isinstance(value, self._kind)
        return (as_param or type(value) is self._kind) and _described(value) == self._inner

    def describe(self) -> str:
        """Describes values that fit."""
        inner = ", ".join(f"{name} {tuple(shape)} of {dtype}" for name, dtype, shape in self._inner)
        return f"a {self._kind.__name__} of shape {tuple(self.size)}, made of {inner}"

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a value that fits, as bytes."""
        packed = torch.zeros(self.nbytes, dtype=torch.uint8, device=getattr(value, self._inner[0][0]).device)
        for (name, *_), view in zip(self._inner, self.views(packed)):
            view.copy_(getattr(value, name))
        return packed

    def taken_apart(self, value: Any) -> Any:
        """Returns a value that fits as bytes, and any other as it is."""
        return self.packed(value.detach()) if self.fits(value) else value

    def views(self, packed: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields views of bytes as the inner tensors."""
        for start, (_, dtype, shape) in zip(self._starts, self._inner):
            yield packed[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def made_of(self, packed: torch.Tensor) -> torch.Tensor:
        """Makes the subclass over bytes, or a plain tensor on the meta device."""
        if packed.is_meta:
            return torch.empty(self.size, dtype=self.dtype, device="meta")
        inner = {name: view for (name, *_), view in zip(self._inner, self.views(packed))}
        return self._kind.__tensor_unflatten__(inner, self._context, self.size, self._stride)  # type: ignore[no-any-return]

    def move(self, made: torch.Tensor, packed: torch.Tensor) -> None:
        """Moves a subclass that was made before to other bytes."""
        for (name, *_), view in zip(self._inner, self.views(packed)):
            getattr(made, name).data = view


def check_packable(fqn: str, param: nn.Parameter) -> None:
    """Refuses a subclass that the wrapper cannot shard."""
    if param.requires_grad:
        why = (
            "trains: the wrapper shards frozen ones only; freeze it before wrapping (requires_grad_(False)), "
            "or shard it by fully_shard, which lets its class say what is gathered"
        )
    elif param.is_meta:
        why = "is on the meta device: give it values before wrapping"
    elif not all(type(inner) in (torch.Tensor, nn.Parameter) for _, inner in inner_tensors(fqn, param)):
        why = "is made of subclasses itself: ignore it with ignored_states"
    else:
        return
    raise TypeError(f"parameter '{fqn}' is a {type(param.detach()).__name__} that {why}")


def inner_tensors(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the inner tensors of a subclass by name, and any other tensor as it is."""
    if not is_packable(tensor):
        yield fqn, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield f"{fqn}.{name}", getattr(tensor, name)


def _described(tensor: torch.Tensor) -> list[_Inner]:
    return [(name.lstrip("."), inner.dtype, inner.shape) for name, inner in inner_tensors("", tensor)]
