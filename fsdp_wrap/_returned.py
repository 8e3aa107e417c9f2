"""Parameters that a forward returns: the caller gets copies, since a unit's full parameters are freed."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._tree import iter_tensors, map_tensors

__all__ = ["without_parameters"]


def without_parameters(handle: ParamHandle, output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Puts copies in the place of a unit's parameters, and of views of them, in what its forward returned.

    Gradients pass through the copies. What was one tensor stays one; an edit of it stays with the copy.

    Returns:
        The output, and the tensors in it.
    """
    tensors = [output] if isinstance(output, torch.Tensor) else list(iter_tensors(output))
    for tensor in tensors:
        if tensor.layout == torch.strided and handle.owns_memory_of(tensor):
            output = _copied(handle, output)
            return output, list(iter_tensors(output))
    return output, tensors


def _copied(handle: ParamHandle, output: Any) -> Any:
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or not handle.owns_memory_of(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_tensors(copy, output)
