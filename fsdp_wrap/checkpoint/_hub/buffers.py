"""Memory for models on the meta device, and buffers that no file holds, such as rotary frequencies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import original_class
from fsdp_wrap._runtime import handles_of, units_in

_DONE = "_is_hf_initialized"
"""What transformers sets on tensors that its initialisation is to leave alone."""


def _non_persistent(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yields the modules with buffers that no state dict has, and the names of these."""
    for path, child in module.named_modules():
        names = [name for name in child._non_persistent_buffers_set if child._buffers.get(name) is not None]
        if names:
            yield path, child, names


def refuse_meta_buffers(module: nn.Module) -> Iterator[str]:
    """Yields errors of buffers without values that nothing can give values to."""
    for path, child, names in _non_persistent(module):
        for name in names:
            if child._buffers[name].is_meta and _model_of(module, path) is None:  # type: ignore[union-attr]
                yield (
                    f"'{path}.{name}' is on the meta device, and no file holds its values: give it a device "
                    "and values before"
                )


def give_memory(module: nn.Module) -> bool:
    """Gives memory without values to what is on the meta device; returns whether anything was."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return False
    handles = handles_of(units_in(module).values())
    device = handles[0].communicator.device if handles else torch.device("cpu")
    give: Any = module._apply  # keeps what has values, unlike `to_empty`
    give(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    return True


def fill_buffers(module: nn.Module) -> None:
    """Computes the non-persistent buffers of models of transformers, as `from_pretrained` does."""
    for path, child, _ in _non_persistent(module):
        model = _model_of(module, path)
        if model is None:
            continue
        saved = child._buffers.keys() - child._non_persistent_buffers_set
        tensors = (*child._parameters.values(), *map(child._buffers.get, saved))
        held = [tensor for tensor in tensors if tensor is not None and not hasattr(tensor, _DONE)]
        for tensor in held:
            setattr(tensor, _DONE, True)
        try:
            with torch.no_grad():
                model._init_weights(child)
        finally:
            for tensor in held:
                delattr(tensor, _DONE)


def _model_of(module: nn.Module, path: str) -> Any:
    """Returns the innermost model of transformers around a module."""
    library = sys.modules.get("transformers.modeling_utils")
    found = None
    for part in ("", *path.split(".")):
        module = getattr(module, part) if part else module
        if library is not None and issubclass(original_class(module), library.PreTrainedModel):
            found = module
    return found
