"""Tensor subclasses: which parameters are such, and calls of their all-gather methods.

`torch.distributed.fsdp.fully_shard` defines `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import MixedPrecisionPolicy, ceil_div
from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass
from fsdp_wrap._params.extensions.inner import InnerTensors
from fsdp_wrap._params.parallel import to_local

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
"""Says whether the gathered tensors are not needed after `POST`; optional, and of torch after 2.14."""

_PLAIN = (torch.Tensor, nn.Parameter)
_SIGNATURES = {1, 5}


def is_extension(param: torch.Tensor) -> bool:
    """Whether a parameter's tensor is a subclass that has the methods, or may get them later.

    A subclass with inner tensors may get them by an assignment to its instances.
    """
    local = to_local(param)
    if type(local) in _PLAIN:
        return False
    return hasattr(local, PRE) or hasattr(local, POST) or is_traceable_wrapper_subclass(local)


def says_nothing(param: torch.Tensor) -> bool:
    """Whether a parameter is a frozen subclass with inner tensors and without the methods."""
    local = to_local(param)
    if param.requires_grad or hasattr(local, PRE) or hasattr(local, POST):
        return False
    return is_traceable_wrapper_subclass(local)


def is_packable(param: torch.Tensor) -> bool:
    """Whether a parameter is a subclass with inner tensors, and no `DTensor`."""
    return is_traceable_wrapper_subclass(param) and not isinstance(param, DTensor)


def check_extension(fqn: str, param: torch.Tensor) -> None:
    """Checks the methods of a subclass, if it has any yet."""
    local = to_local(param)
    if any(hasattr(local, name) for name in (PRE, POST, RELEASES)):
        check_methods(fqn, local)


def check_methods(fqn: str, local: torch.Tensor) -> int:
    """Checks the methods of a subclass; returns the number of arguments of the first."""
    missing = [name for name in (PRE, POST) if not hasattr(local, name)]
    if missing:
        raise TypeError(
            f"parameter '{fqn}' is a {type(local).__name__} without {' and '.join(missing)}, so that nothing "
            "says what is to be gathered of it: define both methods, freeze the parameter before it is "
            "sharded, ignore it with ignored_params, or make it a plain torch.nn.Parameter"
        )
    method: Any = getattr(local, PRE)
    arguments = inspect.signature(method).parameters
    if len(arguments) not in _SIGNATURES:
        raise TypeError(
            f"{PRE} of the {type(local).__name__} in parameter '{fqn}' takes "
            f"{', '.join(arguments) or 'nothing'}; it must take (mesh), or (mesh, outer_size, outer_stride, "
            "module, mp_policy)"
        )
    return len(arguments)


def check_parts(fqn: str, param: torch.Tensor, ranks: int) -> None:
    """Refuses a subclass whose parts lose its methods: one of blocks makes plain tensors of broken blocks."""
    local = to_local(param)
    if not hasattr(local, PRE) or local.is_meta:
        return
    rows = ceil_div(local.shape[0], ranks)
    part = local.detach().new_zeros((rows, *local.shape[1:]))
    if not hasattr(part, PRE):
        raise ValueError(
            f"parameter '{fqn}' of shape {tuple(local.shape)} is a {type(local).__name__}, and {rows} of its "
            f"rows on rank {dist.get_rank()} would be a {type(part).__name__}: its blocks cannot be divided "
            f"over {ranks} ranks. Pad dimension 0 to a multiple of {ranks} blocks, shard over fewer ranks, "
            "or make it a plain torch.nn.Parameter"
        )


def changed_kinds(fqn: str, local: torch.Tensor, use: object, now: object, before: object) -> RuntimeError:
    """Returns the error for a part that gives other kinds of tensors than before for the same use."""
    return RuntimeError(
        f"the {type(local).__name__} in parameter '{fqn}' gave tensors of (shape, dtype) {now} to be "
        f"gathered for {use}, and {before} before on rank {dist.get_rank()}; they must stay the same. What "
        "differs between forward and backward must follow the state of its FSDP module, _training_state "
        "and _reshard_after_forward"
    )


@dataclass(frozen=True)
class Whole:
    """The whole parameter, as its subclass's methods are told of it.

    Attributes:
        mesh: The ranks with the other parts.
        padded: Rows of the largest part.
        ranks: Number of parts.
        inner: Description of the inner tensors, if the subclass has no methods.
    """

    fqn: str
    mesh: DeviceMesh
    size: torch.Size
    mp_policy: MixedPrecisionPolicy
    padded: int
    ranks: int
    inner: InnerTensors | None = None

    @functools.cached_property
    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.size, device="meta").stride()

    def inputs_of(self, local: torch.Tensor, module: nn.Module) -> tuple[list[torch.Tensor], Any]:
        """Asks a part for the tensors to gather, of the same shapes on all ranks, and for metadata."""
        inputs, metadata = self._given_by(local, module)
        if isinstance(inputs, torch.Tensor) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
            raise TypeError(
                f"{PRE} of the {type(local).__name__} in parameter '{self.fqn}' must return a tuple of "
                f"tensors, and what {POST} is to get beside them, not {type(inputs).__name__}"
            )
        return [self._padded(plain(tensor), local) for tensor in inputs], metadata

    def _given_by(self, local: torch.Tensor, module: nn.Module) -> Any:
        inner = self._inner_of(local)
        if inner is not None:
            return inner.inputs(local)
        arguments: tuple[Any, ...] = (self.mesh,)
        if check_methods(self.fqn, local) > 1:
            arguments = (self.mesh, self.size, self.stride, module, self.mp_policy)
        return getattr(local, PRE)(*arguments)

    def made_of(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        local: torch.Tensor,
        **out: Any,
    ) -> Any:
        """Lets a part make the whole from gathered tensors; see `fsdp_post_all_gather`."""
        inner = self._inner_of(local)
        if inner is not None:
            return inner.put_together(outputs, local, (self.size, self.stride), **out)
        method: Any = getattr(local, POST)
        return method(outputs, metadata, dtype, **out)

    def releases(self, local: torch.Tensor) -> bool:
        """Whether a part's subclass does not need the gathered tensors once it has made the whole."""
        ask = getattr(local, RELEASES, None)
        return ask is not None and bool(ask())

    def _inner_of(self, local: torch.Tensor) -> InnerTensors | None:
        """Returns the description of inner tensors, unless the part has the methods by now."""
        return None if hasattr(local, PRE) else self.inner

    @property
    def uneven(self) -> bool:
        """Whether parts have different numbers of rows."""
        return self.size[0] != self.padded * self.ranks

    def _padded(self, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Pads a tensor of a smaller part to the rows of the largest."""
        if not self.uneven:
            return tensor
        rows = local.shape[0] if local.numel() else 0
        if not tensor.ndim or tensor.shape[0] not in (rows, self.padded):  # on all ranks alike
            raise ValueError(
                f"parameter '{self.fqn}' of shape {tuple(self.size)} is not divided evenly, and {PRE} of its "
                f"{type(local).__name__} returned a tensor of shape {tuple(tensor.shape)} on rank "
                f"{dist.get_rank()}: the first dimension must have its {rows} rows, or {self.padded} as "
                "on the first rank. For tensors with other rows, such as scales of blocks, pad the parameter "
                f"so that {self.ranks} ranks get whole blocks, or shard over fewer ranks"
            )
        if tensor.shape[0] == self.padded:
            return tensor
        full = tensor.new_zeros((self.padded, *tensor.shape[1:]))
        full[:rows].copy_(tensor)
        return full

    def joined(self, memory: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Views gathered bytes as one tensor, joined along the first dimension, without the padding."""
        values = memory.view(dtype)
        if not shape:
            return values
        rows = values.view(self.ranks * shape[0], *shape[1:])
        return rows[: self.size[0]] if self.uneven else rows


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a plain tensor of the same values."""
    if type(tensor) in _PLAIN:
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
