"""Memory for models on the meta device, and buffers that no file holds, such as rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import Place, clean_fqn, named, params, replace_tensor
from fsdp_wrap._runtime import buffers_of, units_in


def unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yields the buffers that no state dict has: name, module, name there, tensor."""
    for path, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(name)
            if buffer is not None:
                yield clean_fqn(f"{path}.{name}").lstrip("."), child, name, buffer


def refuse_meta_buffers(module: nn.Module, computed: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yields errors of buffers that have no values and get none."""
    for fqn, _, _, buffer in unsaved_buffers(module):
        if buffer.is_meta and fqn not in computed:
            yield (
                f"'{fqn}' is on the meta device, and no file holds its values: give it a device and "
                "values before"
            )


def give_memory(module: nn.Module) -> bool:
    """Gives memory without values to what is on the meta device; returns whether anything was.

    Tied parameters stay tied, unlike with `to_empty`.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return False
    all_buffers = buffers_of(units_in(module).values())
    on_host = any(sharded.offloaded for buffers in all_buffers for sharded in buffers.params)
    device = all_buffers[0].communicator.device if all_buffers and not on_host else torch.device("cpu")
    ties: dict[int, list[Place]] = {}
    for _, place, param in named(module, params, all_names=True):
        if param is not None:
            ties.setdefault(id(param), []).append(place)
    give: Any = module._apply
    give(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (owner, name), *others in ties.values():
        param = owner._parameters[name]
        for other, its_name in others:
            if param is not None and other._parameters[its_name] is not param:
                replace_tensor(other, its_name, param)
    return True


def fill_buffers(module: nn.Module, computed: Mapping[str, torch.Tensor]) -> None:
    """Copies computed values to the buffers that no file holds."""
    with torch.no_grad():
        for fqn, _, _, buffer in unsaved_buffers(module):
            if fqn in computed:
                buffer.copy_(computed[fqn])
