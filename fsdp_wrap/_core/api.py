"""Enums and configuration dataclasses of the wrapper; names, values and defaults equal torch's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from fsdp_wrap._core.torch_private import BatchNorm


class ShardingStrategy(Enum):
    """Which tensors are sharded over the ranks, and for how long parameters stay unsharded.

    Attributes:
        FULL_SHARD: Parameters, gradients and optimizer state are sharded; a unit unshards for its
            forward and again for its backward.
        SHARD_GRAD_OP: Like FULL_SHARD, but parameters stay unsharded from forward to backward.
        NO_SHARD: Everything is replicated, gradients are averaged over the ranks.
        HYBRID_SHARD: FULL_SHARD within a host, replicated across hosts.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a host, replicated across hosts.
    """

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


class BackwardPrefetch(Enum):
    """When the backward issues the all-gather of the unit that comes next in backward order.

    Attributes:
        BACKWARD_PRE: Before the running unit's gradients are computed: most overlap, one more unit
            in memory.
        BACKWARD_POST: After the running unit's backward is over: less memory, less overlap.
    """

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


@dataclass
class MixedPrecision:
    """Dtypes of computation and communication, of floating-point tensors of 16 bits and more.

    Optimizers, full parameters and state dicts always see the parameters' and buffers' own dtypes.

    Attributes:
        param_dtype: Dtype of parameters in forward, backward and gathers; None for the parameters' own.
        reduce_dtype: Dtype of gradients while they are reduced; None for `param_dtype`.
        buffer_dtype: Dtype of buffers from the first forward on; None for their own.
        keep_low_precision_grads: Leave the sharded gradients in `reduce_dtype`.
        cast_forward_inputs: Cast the unit's inputs to `param_dtype`.
        cast_root_forward_inputs: Cast them if the unit is the root.
        _module_classes_to_ignore: Modules of these classes become units of their own in full precision,
            which take inputs of any precision, if there is an `auto_wrap_policy`.

    Raises:
        ValueError: If a dtype is not a floating-point one of 16 bits or more.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuses dtypes that nothing can be computed in; clients may have set fields since."""
        _check_dtypes(self, "param_dtype", "reduce_dtype", "buffer_dtype")


def check_kind(name: str, value: object, kind: type, optional: bool = True) -> None:
    """Raises a TypeError for an argument of another type, also one of the same name in another package."""
    if isinstance(value, kind) or (optional and value is None):
        return
    found, path = type(value), f"{kind.__module__}.{kind.__qualname__}"
    if found.__name__ == kind.__name__:
        raise TypeError(
            f"{name} must be a {path}, not a {found.__module__}.{found.__qualname__}, which is another class "
            f"of that name: import {kind.__name__} from fsdp_wrap (given: {value!r})"
        )
    wanted = f"{'an' if kind is int else 'a'} {kind.__name__}{' or None' if optional else ''}"
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
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", size.upper())
        if found is None:
            raise ValueError(f"{name} must look like '80GB' or '24GiB', not {size!r}")
        power = " KMGT".index(found[2]) if found[2] else 0
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
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


def _check_dtypes(policy: object, *names: str) -> None:
    for name in names:
        dtype = getattr(policy, name)
        known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if dtype is not None and not known:
            raise ValueError(
                f"{type(policy).__name__}({name}=...) takes torch.bfloat16, float16, float32, float64 or "
                f"None, not {dtype!r}"
            )


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and communication of a `fully_shard`ed module.

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

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        _check_dtypes(self, "param_dtype", "reduce_dtype", "output_dtype")
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise TypeError(
                "MixedPrecisionPolicy(param_dtype_override_fn=...) takes a function of a parameter or None, "
                f"not {override!r}"
            )


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
class OffloadPolicy:
    """No offload of a `fully_shard`ed module."""


@dataclass
class CPUOffloadPolicy(_Offload, OffloadPolicy):
    """Sharded parameters, gradients and so optimizer state live in host memory, or optimizer state alone.

    Attributes:
        pin_memory: Whether that is pinned, where there is an accelerator that copies from it.
        offload_params: Whether parameters and gradients live there; not one of torch's fields.
        offload_optimizer_state: The field of `CPUOffload`; torch's policy has none.

    Raises:
        ValueError: If the parameters are offloaded and the state is not, or neither is.
    """

    pin_memory: bool = True
    offload_params: bool = field(default=True, kw_only=True)
    offload_optimizer_state: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.offload_params and not self.offload_optimizer_state:
            raise ValueError("this CPUOffloadPolicy offloads nothing; pass OffloadPolicy(), the default")


@dataclass
class DataParallelMeshDims:
    """The dimensions for data parallelism of a mesh on which all parameters are `DTensor`s.

    Attributes:
        shard: Name of the dimension over which parameters are sharded, or names of several, which become one.
        replicate: Name of the dimension over which they are replicated, or names of several.

    Raises:
        ValueError: If it names none.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError(
                "DataParallelMeshDims needs at least one of shard and replicate: names of a mesh's dimensions"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in `shard`."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in `replicate`."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass
class CPUOffload(_Offload):
    """Whether sharded parameters and gradients, or optimizer state, live in host memory.

    Gradients are where their parameters are, as torch wants it.

    Attributes:
        offload_params: Keep parameters and gradients there, and so optimizer state: steps run on the host.
        offload_optimizer_state: Keep the state of torch's optimizers there between steps, which run on the
            device, with all of an optimizer's state at once; the host waits at the end of each. State
            from `optimizer.load_state_dict` is on the device until the next step ends. None for the value of
            `offload_params`. Not one of torch's fields.

    Raises:
        ValueError: If the parameters are offloaded and the state is not.
    """

    offload_params: bool = False
    offload_optimizer_state: bool | None = field(default=None, kw_only=True)


class StateDictType(Enum):
    """The kind of state dict that `state_dict()` returns and `load_state_dict()` takes.

    Attributes:
        FULL_STATE_DICT: Full tensors, the same on every rank; collective.
        LOCAL_STATE_DICT: This rank's flat shards, as `IntervalTensor`s of the flat buffers, which fit only
            the same ranks and wrapping.
        SHARDED_STATE_DICT: This rank's pieces as tensors of the full shape (`IntervalTensor`), for
            `torch.distributed.checkpoint`, which fits them to any ranks and wrapping.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """The keys of parameters in an optimizer state dict.

    Attributes:
        PARAM_NAME: By the names of the unwrapped module.
        PARAM_ID: By their position in the optimizer, as `torch.optim` does.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Options of a model's state dict.

    Attributes:
        offload_to_cpu: Copy the tensors to host memory. Without it those that are not gathered are the
            model's own memory.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a state dict of full tensors.

    Attributes:
        rank0_only: The first rank alone gets them; the others get nothing, and their state-dict hooks see
            tensors without memory (on the meta device). Loading takes full tensors on every rank.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a state dict of flat shards."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a state dict of the pieces that this rank holds.

    Attributes:
        _use_dtensor: Values are `DTensor`s of rows, for which the ranks gather one parameter after the other,
            instead of pieces, which need no communication. Wrappers that were given a `device_mesh` do so in
            any case, as torch's.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dict.

    Attributes:
        offload_to_cpu: Copy the tensors to host memory. Without it those that are not gathered are the
            optimizer's own memory.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer state dict of full tensors.

    Attributes:
        rank0_only: The first rank alone gets them, and gives them to the others when they are loaded.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer state dict beside a model's flat shards; the same as of pieces."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer state dict of the pieces that this rank holds.

    Attributes:
        _use_dtensor: The field of `ShardedStateDictConfig`.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The kinds of state dicts that a wrapped module makes now.

    Attributes:
        state_dict_type: The kind.
        state_dict_config: Options of the model's state dicts.
        optim_state_dict_config: Options of the optimizer's.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig
