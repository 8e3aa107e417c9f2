"""What mixed precision means: dtypes of a segment, casts of a unit's inputs, outputs and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_wrap._tree import iter_tensors, map_tensors
from fsdp_wrap.api import MixedPrecision

__all__ = ["BufferCasts", "FullPrecision", "InputCasts", "SegmentDtypes", "cast_floating", "floating_dtype"]


def is_castable(dtype: torch.dtype) -> bool:
    """Whether mixed precision applies: not to integers, nor to 8-bit floats, which are quantised values."""
    return dtype.is_floating_point and dtype.itemsize > 1


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with every floating-point tensor in it cast to `dtype`, differentiably."""
    return map_tensors(lambda tensor: tensor.to(dtype) if is_castable(tensor.dtype) else tensor, value)


def floating_dtype(value: Any) -> torch.dtype | None:
    """Returns the dtype of the first floating-point tensor in `value`."""
    return next((tensor.dtype for tensor in iter_tensors(value) if is_castable(tensor.dtype)), None)


class FullPrecision(MixedPrecision):
    """The policy of a unit that an enclosing policy's `_module_classes_to_ignore` keeps in full precision.

    It takes inputs of any precision, and returns outputs in that of its inputs.
    """


@dataclass(frozen=True)
class SegmentDtypes:
    """The dtypes of one segment.

    Attributes:
        master: Of the sharded parameters.
        param: Of the leaves, and of the bytes that a gather moves.
        reduce: Of the gradients while they are accumulated and reduced.
        grad: Of the sharded parameters' gradients.
    """

    master: torch.dtype
    param: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype

    @classmethod
    def of(cls, master: torch.dtype, policy: MixedPrecision) -> SegmentDtypes:
        """Applies a policy; gradients are reduced in the param dtype unless it says otherwise."""
        if not is_castable(master):
            return cls(master, master, master, master)
        param = policy.param_dtype or master
        reduce = policy.reduce_dtype or param
        return cls(master, param, reduce, reduce if policy.keep_low_precision_grads else master)

    def __str__(self) -> str:
        used = {"computed in": self.param, "reduced in": self.reduce}
        others = [f"{how} {_short(dtype)}" for how, dtype in used.items() if dtype != self.master]
        return ", ".join([_short(self.master), *others])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class InputCasts:
    """Casts of a unit's floating-point inputs and outputs; None leaves them as they are.

    Attributes:
        nested: Dtype of the inputs of a unit below the root.
        root: Dtype of the root's inputs.
        restores_outputs: Whether outputs go back to the dtype of the first input.
        outputs: Dtype of the outputs otherwise.
    """

    nested: torch.dtype | None = None
    root: torch.dtype | None = None
    restores_outputs: bool = False
    outputs: torch.dtype | None = None

    @classmethod
    def of(cls, policy: MixedPrecision, module: nn.Module) -> InputCasts:
        """Applies a policy to the unit made of `module`."""
        if isinstance(policy, FullPrecision):
            own = floating_dtype([*module.parameters(), *module.buffers()]) or torch.float32
            return cls(own, own, restores_outputs=True)
        casts_root = policy.cast_root_forward_inputs or policy.cast_forward_inputs
        return cls(
            policy.param_dtype if policy.cast_forward_inputs else None,
            policy.param_dtype if casts_root else None,
        )


class _BufferCast:
    """One buffer in two dtypes, of which the module shows one."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._original: torch.Tensor | None = None
        self._cast: torch.Tensor | None = None

    def show_cast(self, dtype: torch.dtype) -> None:
        shown = self._module._buffers.get(self._name)
        if shown is not None and shown is not self._cast:
            self._original, self._cast = shown, shown.to(dtype)
            self._module._buffers[self._name] = self._cast

    def show_original(self) -> None:
        original, cast = self._original, self._cast
        if original is None or cast is None or self._module._buffers.get(self._name) is not cast:
            return
        # Compared by value: batch norm updates its statistics behind the version counters.
        original.copy_(torch.where(cast == original.to(cast.dtype), original, cast.to(original.dtype)))
        self._module._buffers[self._name] = original


class BufferCasts:
    """The floating-point buffers of one unit, which its module computes with in the buffer dtype.

    The originals are kept: values that no forward has changed come back exactly.

    Args:
        modules: The unit's modules.
        dtype: The buffer dtype; None leaves them as they are.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._holders = 0
        self._computes = False
        self._casts = [
            _BufferCast(module, name)
            for module in (modules if dtype is not None else ())
            for name, buffer in module._buffers.items()
            if buffer is not None and is_castable(buffer.dtype) and buffer.dtype != dtype
        ]

    def show_cast(self) -> None:
        """Lets the modules compute with buffers in the buffer dtype, from now on."""
        self._computes = True
        if self._dtype is not None and self._casts:
            with torch.inference_mode(False), torch.no_grad():
                for cast in self._casts:
                    cast.show_cast(self._dtype)

    @torch.no_grad()
    def hold_original(self) -> None:
        """Shows the buffers in their own dtype, with the values that they have now, until `release`."""
        self._holders += 1
        for cast in self._casts:
            cast.show_original()

    def release(self) -> None:
        """Ends one `hold_original`."""
        self._holders -= 1
        if self._computes and not self._holders:
            self.show_cast()
