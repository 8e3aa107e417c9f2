"""Mixed precision: dtypes of a segment, casts of a unit's inputs, outputs and buffers."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from fsdp_wrap._core.api import MixedPrecisionPolicy
from fsdp_wrap._core.formatting import format_dtype
from fsdp_wrap._core.pytree import Replaced, iter_tensors, map_tensors

_REDUCED_IN_GRAD_DTYPE = hasattr(torch.Tensor, "_has_grad_dtype_override")
"""Whether torch's own `fully_shard`, from 2.15 on, follows `grad_dtype` where no reduce dtype is given."""


def is_castable(dtype: torch.dtype) -> bool:
    """Whether mixed precision applies: not to integers, nor to 8-bit floats, which are quantised values."""
    return dtype.is_floating_point and dtype.itemsize > 1


def cast_floating(value: Any, dtype: torch.dtype, replaced: Replaced | None = None) -> Any:
    """Returns `value` with every floating-point tensor in it cast to `dtype`, differentiably."""
    return map_tensors(
        lambda tensor: tensor.to(dtype) if is_castable(tensor.dtype) else tensor, value, replaced
    )


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

    `master` is of the sharded parameters; `param` of the leaves and of gathered bytes; `reduce` of gradients
    while they are accumulated and reduced; `grad` of the sharded parameters' gradients. Autograd casts the
    leaves' gradients to `arriving`; None leaves them as they are.
    """

    master: torch.dtype
    param: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    arriving: torch.dtype | None

    @classmethod
    def full(cls, master: torch.dtype) -> SegmentDtypes:
        """Returns the dtypes of a segment that keeps to its master dtype."""
        return cls(master, master, master, master, master)

    @property
    def mixed(self) -> bool:
        """Whether it computes or reduces in another dtype than its master dtype."""
        return self.param != self.master or self.reduce != self.master

    def __str__(self) -> str:
        used = {"computed in": self.param, "reduced in": self.reduce}
        others = [f"{how} {format_dtype(dtype)}" for how, dtype in used.items() if dtype != self.master]
        return ", ".join([format_dtype(self.master), *others])


@dataclass(frozen=True)
class SegmentPolicy:
    """The dtypes asked for one segment, whatever its master dtype.

    None of `param` and `grad` is the master dtype; None of `reduce` is the sharded gradients' dtype if
    `follows_grad`, else the param dtype. `keeps_reduced` leaves sharded gradients as they were reduced.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    grad: torch.dtype | None = None
    keeps_reduced: bool = False
    follows_grad: bool = False

    @classmethod
    def of(cls, policy: MixedPrecision) -> SegmentPolicy:
        """Applies the wrapper's policy."""
        kept = policy.keep_low_precision_grads
        return _same_policy(policy.param_dtype, policy.reduce_dtype, keeps_reduced=kept)

    @classmethod
    def of_param(cls, param: nn.Parameter, fqn: str, policy: MixedPrecisionPolicy) -> SegmentPolicy:
        """Applies the policy of `fully_shard` to one parameter.

        Raises a ValueError, with the parameter's name, for a dtype that the policy's function may not return.
        """
        override, computed = policy.param_dtype_override_fn, policy.param_dtype
        if override is not None:
            computed = _checked(override(param), param, fqn, computed)
        if not _REDUCED_IN_GRAD_DTYPE:
            return _same_policy(computed, policy.reduce_dtype)
        asked: bool = param._has_grad_dtype_override  # type: ignore[attr-defined]
        return _same_policy(
            computed,
            policy.reduce_dtype,
            grad=param.grad_dtype if asked else None,
            keeps_reduced=asked and param.grad_dtype is None,
            follows_grad=policy.reduce_dtype is None,
        )

    def reduced_in(self, master: torch.dtype) -> torch.dtype:
        """Returns the reduce dtype, were there no other segments in the unit."""
        if self.reduce is not None:
            return self.reduce
        if self.follows_grad and not self.keeps_reduced:
            return self.grad or master
        return self.param or master

    @functools.cache  # noqa: B019  # few, and one object for all segments that have them
    def dtypes(self, master: torch.dtype, widest: torch.dtype | None) -> SegmentDtypes:
        """Returns all dtypes for a master dtype.

        `widest` is the least reduce dtype where the sharded gradients' dtype decides; None for any.
        """
        if not is_castable(master):
            return SegmentDtypes.full(master)
        param, reduce = self.param or master, self.reduced_in(master)
        if self.follows_grad and widest is not None:
            reduce = torch.promote_types(reduce, widest)
        arriving: torch.dtype | None = param
        if self.follows_grad and self.keeps_reduced:
            arriving = None
        elif self.follows_grad and self.grad is not None and self.grad.itemsize < param.itemsize:
            arriving = self.grad
        grad = reduce if self.keeps_reduced else self.grad or master
        return SegmentDtypes(master, param, reduce, grad, arriving)


_same_policy = functools.cache(SegmentPolicy)
"""Returns a policy, one object for all segments that have it."""


def segment_dtypes(segments: Sequence[tuple[torch.dtype, SegmentPolicy, bool]]) -> list[SegmentDtypes]:
    """Returns the dtypes of one unit's segments, given (master dtype, policy, whether it trains) of each.

    Where the sharded gradients' dtypes decide the reduce dtype and differ within one master dtype, the widest
    is taken for all, as in torch.
    """
    widest: dict[torch.dtype, torch.dtype] = {}
    for master, policy, trains in segments:
        if trains and policy.follows_grad:
            own = policy.reduced_in(master)
            widest[master] = torch.promote_types(widest.get(master, own), own)
    return [policy.dtypes(master, widest.get(master)) for master, policy, _ in segments]


def _checked(chosen: Any, param: nn.Parameter, fqn: str, usual: torch.dtype | None) -> torch.dtype | None:
    if chosen is None or chosen == usual:
        return usual
    if not isinstance(chosen, torch.dtype) or chosen != param.dtype:
        raise ValueError(
            f"param_dtype_override_fn returned {chosen!r} for parameter '{fqn}'; it must return None, "
            f"param_dtype ({usual}) or the parameter's own dtype ({param.dtype})"
        )
    return chosen


@dataclass(frozen=True)
class InputCasts:
    """Casts of a unit's floating-point inputs and outputs; None leaves them as they are.

    `nested` is for a unit below the root, `root` for the root. `restores_outputs` casts outputs to the dtype
    of the first input, else `outputs` is theirs.
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

    def prepare(
        self,
        at_root: bool,
        device: torch.device | None,
        args: Any,
        kwargs: Any,
        replaced: Replaced | None = None,
    ) -> tuple[torch.dtype | None, Any, Any]:
        """Moves and casts the inputs of a forward.

        Args:
            at_root: Whether the unit is the root.
            device: Device to move tensors to; the CPU, or None, to leave them where they are.
            args: Positional inputs.
            kwargs: Keyword inputs.
            replaced: List to which the replaced tensors in containers are added; None to copy containers.

        Returns:
            The dtype to cast the outputs to, or None, and the inputs.
        """
        if device is not None and device.type != "cpu":
            args, kwargs = map_tensors(
                lambda value: value.to(device, non_blocking=True), (args, kwargs), replaced
            )
        returned = floating_dtype((args, kwargs)) if self.restores_outputs else self.outputs
        computed = self.root if at_root else self.nested
        if computed is not None:
            args, kwargs = cast_floating((args, kwargs), computed, replaced)
        return returned, args, kwargs


NO_CASTS = InputCasts()


class _Holder:
    """A module, held weakly, in copies too: one of a unit's modules holds the unit."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Holder:
        module = self._module()
        return self if module is None else _Holder(copy.deepcopy(module, memo))

    @property
    def buffers(self) -> dict[str, torch.Tensor | None]:
        """The module's buffers by name; none once the module is gone."""
        module = self._module()
        return {} if module is None else module._buffers


class _BufferCast:
    """One buffer in two dtypes, of which the module shows one."""

    def __init__(self, holder: _Holder, name: str) -> None:
        self._holder, self._name = holder, name
        self._original: torch.Tensor | None = None
        self._cast: torch.Tensor | None = None

    def show_cast(self, dtype: torch.dtype) -> None:
        shown = self._holder.buffers.get(self._name)
        if shown is not None and shown is not self._cast:
            self._original, self._cast = shown, shown.to(dtype)
            self._holder.buffers[self._name] = self._cast

    def show_original(self) -> None:
        original, cast = self._original, self._cast
        if original is None or cast is None or self._holder.buffers.get(self._name) is not cast:
            return
        # Compared by value: batch norm updates its statistics behind the version counters.
        original.copy_(torch.where(cast == original.to(cast.dtype), original, cast.to(original.dtype)))
        self._holder.buffers[self._name] = original


class BufferCasts:
    """The floating-point buffers of one unit, which its module computes with in the buffer dtype.

    The originals are kept: values that no forward has changed come back exactly. `dtype` None leaves all as
    they are; then `casts` is empty, and no method need be called.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._holds = 0
        self._computes = False
        self._modules = (*map(weakref.ref, modules),)  # one of them holds the unit
        self.casts: Sequence[_BufferCast] = ()
        if dtype is not None:
            self.casts = [
                _BufferCast(_Holder(module), name)
                for module in self._alive()
                for name, buffer in module._buffers.items()
                if buffer is not None and is_castable(buffer.dtype) and buffer.dtype != dtype
            ]

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferCasts:
        copied = BufferCasts([copy.deepcopy(module, memo) for module in self._alive()], None)
        copied._dtype, copied._holds, copied._computes = self._dtype, self._holds, self._computes
        copied.casts = copy.deepcopy(self.casts, memo)
        return copied

    def _alive(self) -> Iterator[nn.Module]:
        modules = (reference() for reference in self._modules)
        return (module for module in modules if module is not None)

    def shown(self) -> Iterator[torch.Tensor]:
        """Yields all buffers of the modules that are alive, as these show them now."""
        for module in self._alive():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    def show_cast(self) -> None:
        """Shows the buffers in the buffer dtype, from now on."""
        self._computes = True
        if self._dtype is not None and self.casts:
            with torch.inference_mode(False), torch.no_grad():
                for cast in self.casts:
                    cast.show_cast(self._dtype)

    def show_original(self) -> None:
        """Shows the buffers in their own dtype, from now on."""
        self._computes = False
        with torch.inference_mode(False), torch.no_grad():
            for cast in self.casts:
                cast.show_original()

    @torch.no_grad()
    def hold_original(self) -> None:
        """Shows the buffers in their own dtype, with their present values, until `release`."""
        self._holds += 1
        for cast in self.casts:
            cast.show_original()

    def release(self) -> None:
        """Ends one `hold_original`."""
        self._holds -= 1
        if self._computes and not self._holds:
            self.show_cast()
