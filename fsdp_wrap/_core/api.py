"""Configurations with fields that torch's lack, as subclasses of torch's, and checks of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

_Config = TypeVar("_Config")


def with_our_fields(given: Any, kind: type[_Config]) -> _Config:
    """Returns a configuration, ours or torch's, as `kind` of ours; our own fields get their defaults."""
    if isinstance(given, kind):
        return given
    names = {option.name for option in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in vars(given).items() if name in names})


def _equal(ours: Any, other: Any) -> bool:
    """Compares with ours or torch's; one that lacks a field has its default."""
    return all(
        getattr(ours, option.name) == getattr(other, option.name, option.default) for option in fields(ours)
    )


def check_kind(name: str, value: object, kind: type, optional: bool = True) -> None:
    """Raises a TypeError for an argument of another type."""
    if isinstance(value, kind) or (optional and value is None):
        return
    wanted = f"{'an' if kind.__name__[0] in 'iO' else 'a'} {kind.__name__}{' or None' if optional else ''}"
    raise TypeError(f"{name} must be {wanted}, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raises a TypeError unless a value is a bool or None: a string is true whatever it says."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} must be True, False or None (the default), not {value!r}")


def check_nbytes(name: str, value: object) -> None:
    """Raises a TypeError or a ValueError unless a value is a number of bytes or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"{name} must be an int or None (the default), not {value!r}")
    if value is not None and value < 0:
        raise ValueError(f"{name} must not be negative, but is {value}; 0 switches it off")


_OWN = "shared_memory", "travel_together_bytes", "state_over_replicas"


def check_own(*values: object) -> None:
    """Checks the arguments that torch does not have, or the first of them."""
    for name, value in zip(_OWN, values):
        (check_nbytes if name.endswith("_bytes") else check_flag)(name, value)


_LEAST_MEMORY = 2**20
"""Bytes from which on a number without a unit may be the memory of a device."""


def nbytes_of(size: int | str, name: str) -> int:
    """Returns a number of bytes, given as one or as text like "80GB" or "24GiB"; `name` is for errors."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"{name} must be an int or a str such as '80GB', not {size!r}")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", size.upper())
        if match is None:
            raise ValueError(f"{name} must look like '80GB' or '24GiB', not {size!r}")
        power = " KMGT".index(match[2]) if match[2] else 0
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size <= 0:
        raise ValueError(f"{name} must be positive, not {size}")
    return size


def memory_of(size: int | str, name: str) -> int:
    """Returns the bytes of a device's memory as `nbytes_of`; refuses a number that lacks its unit."""
    nbytes = nbytes_of(size, name)
    if nbytes < _LEAST_MEMORY and str(size).strip().replace(".", "").isdigit():
        raise ValueError(
            f"{name} is {nbytes} bytes, less than any device has: write the unit, as in '{size}GB' or "
            f"'{size}GiB' ('{size}B' if it is so small)"
        )
    return nbytes


def check_dtypes(policy: torch_fsdp.MixedPrecision | torch_fsdp.MixedPrecisionPolicy) -> None:
    """Raises a ValueError for dtypes of a policy that nothing can be computed in."""
    for name in (option.name for option in fields(policy) if option.name.endswith("_dtype")):
        dtype = getattr(policy, name)
        known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if dtype is not None and not known:
            raise ValueError(
                f"{type(policy).__name__}({name}=...) takes torch.bfloat16, float16, float32, float64 or "
                f"None, not {dtype!r}"
            )


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """Dtypes of computation and communication of a `fully_shard`ed module.

    A subclass of torch's, whose fields come first. Torch's has `param_dtype_override_fn` from 2.15 on.

    Attributes:
        param_dtype: Dtype of parameters in forward, backward and gathers; None for the parameters' own.
        reduce_dtype: Dtype of gradients while they are accumulated and reduced. None means the same as in
            the installed torch: before 2.15 `param_dtype`, from 2.15 on the `grad_dtype` of each
            parameter, which is the parameter's own dtype if it was not set before `fully_shard`.
        output_dtype: Dtype of the outputs of forward; None leaves them as they are.
        cast_forward_inputs: Cast the inputs to `param_dtype`.
        param_dtype_override_fn: Called once for each parameter of the unit. It returns the parameter's own
            dtype to leave it in that, or None (or `param_dtype`) for `param_dtype`; the same on all ranks.

    Raises:
        ValueError: If a dtype is not a floating-point one of 16 bits or more.
        TypeError: If `param_dtype_override_fn` cannot be called.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        check_dtypes(self)
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise TypeError(
                "MixedPrecisionPolicy(param_dtype_override_fn=...) takes a function of a parameter or None, "
                f"not {override!r}"
            )

    def __eq__(self, other: object) -> bool:
        return _equal(self, other) if isinstance(other, torch_fsdp.MixedPrecisionPolicy) else NotImplemented

    __hash__ = torch_fsdp.MixedPrecisionPolicy.__hash__


class _Offload:
    """The rules of both policies that offload parameters or optimizer state."""

    offload_params: bool
    offload_optimizer_state: bool | None

    def __post_init__(self) -> None:
        if self.offload_params and self.offload_optimizer_state is False:
            raise ValueError(
                f"{type(self).__name__}(offload_params=True) keeps optimizer state in host memory as well, "
                "since steps run where the parameters are; leave offload_optimizer_state out"
            )

    @property
    def only_state(self) -> bool:
        """Whether optimizer state alone is offloaded."""
        return bool(self.offload_optimizer_state) and not self.offload_params


@dataclass
class CPUOffloadPolicy(_Offload, torch_fsdp.CPUOffloadPolicy):
    """Sharded parameters, gradients and so optimizer state live in host memory, or optimizer state alone.

    A subclass of torch's, whose field `pin_memory` comes first.

    Attributes:
        pin_memory: Whether that is pinned, where there is an accelerator that copies from it.
        offload_params: Whether parameters and gradients live there; not one of torch's fields.
        offload_optimizer_state: The field of `CPUOffload`; torch's policy has none.

    Raises:
        ValueError: If the parameters are offloaded and the state is not, or neither is.
    """

    offload_params: bool = field(default=True, kw_only=True)
    offload_optimizer_state: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.offload_params and not self.offload_optimizer_state:
            raise ValueError("this CPUOffloadPolicy offloads nothing; pass OffloadPolicy(), the default")

    def __eq__(self, other: object) -> bool:
        return _equal(self, other) if isinstance(other, torch_fsdp.CPUOffloadPolicy) else NotImplemented


@dataclass
class CPUOffload(_Offload, torch_fsdp.CPUOffload):
    """Whether sharded parameters and gradients, or optimizer state, live in host memory.

    A subclass of torch's, whose field `offload_params` comes first. Gradients are where their parameters are,
    as torch wants it.

    Attributes:
        offload_params: Keep parameters and gradients there, and so optimizer state: steps run on the host.
        offload_optimizer_state: Keep the state of torch's optimizers there between steps, which run on the
            device, with all of an optimizer's state at once; the host waits at the end of each. State
            from `optimizer.load_state_dict` is on the device until the next step ends. None for the value of
            `offload_params`. Not one of torch's fields.

    Raises:
        ValueError: If the parameters are offloaded and the state is not.
    """

    offload_optimizer_state: bool | None = field(default=None, kw_only=True)

    def __eq__(self, other: object) -> bool:
        return _equal(self, other) if isinstance(other, torch_fsdp.CPUOffload) else NotImplemented


if TYPE_CHECKING or hasattr(torch_fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
else:  # torch 2.11

    @dataclass
    class DataParallelMeshDims:
        """The dimensions for data parallelism of a mesh on which all parameters are `DTensor`s.

        Attributes:
            shard: Name of the dimension over which parameters are sharded, or names of several.
            replicate: Name of the dimension over which they are replicated, or names of several.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The names in `shard`."""
            return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The names in `replicate`."""
            return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())
