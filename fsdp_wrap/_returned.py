"""Parameters that a forward returns: the caller gets copies, since a unit's full parameters are freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._tree import map_tensors

__all__ = ["without_parameters"]


def without_parameters(handle: ParamHandle, output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns a forward's output with copies in the place of parameters of the unit, and of views of them.

    Gradients pass through the copies. What was one tensor stays one; an edit of it stays with the copy.

    Args:
        handle: Of the unit.
        output: What the forward returned.
        tensors: Those in it.
    """
    for tensor in tensors:
        if tensor.layout == torch.strided and handle.owns_memory_of(tensor):
            return _copied(handle, output)
    return output


def _copied(handle: ParamHandle, output: Any) -> Any:
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or not handle.owns_memory_of(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_tensors(copy, output)
