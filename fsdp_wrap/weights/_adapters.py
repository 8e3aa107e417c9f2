"""LoRA adapters, as peft puts them around linear layers, found by their parts; nothing of peft is imported.

Source of the arithmetic: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import clean_fqn, is_castable
from fsdp_wrap.weights._recipes import Formula, LowRank, Merged, SourceTensor

_BASE, _AROUND = "base_layer", "base_model.model."
_SAVED, _ORIGINAL = "modules_to_save", "original_module"
_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


def merged(
    model: nn.Module,
    plain: Mapping[str, SourceTensor],
    dtype: torch.dtype | None,
    subclasses: Collection[str],
) -> dict[str, Formula]:
    """Returns the tensors of a model with its active adapters merged, by their names without adapters."""
    left, sums = dict(plain), {}
    for name, module in model.named_modules():
        if "lora_A" in module._modules:
            sums.update(_of_layer(clean_fqn(name), module, left, dtype))
        elif _SAVED in module._modules:
            _choose_saved(clean_fqn(name), module, left)
    quantised = [name for name in sums if name in subclasses]
    if quantised:
        raise ValueError(
            f"'{quantised[0]}' is of a tensor subclass, to which an adapter cannot be added: use "
            "adapters='apart'"
        )
    formulas: dict[str, Formula] = {}
    for name in plain:
        if name in sums or name in left:
            formulas[_without_adapters(name)] = sums.get(name) or cast(left[name], dtype, subclasses)
    return formulas


def cast(tensor: SourceTensor, dtype: torch.dtype | None, subclasses: Collection[str]) -> SourceTensor:
    """Returns a tensor in the dtype in which it travels, unless it is quantised or not floating-point."""
    if dtype is None or tensor.key in subclasses or not is_castable(tensor.dtype):
        return tensor
    return SourceTensor(tensor.key, tensor.shape, dtype)


def _of_layer(
    fqn: str, layer: Any, left: dict[str, SourceTensor], dtype: torch.dtype | None
) -> dict[str, Formula]:
    """Removes an adapted layer's own tensors from `left`; returns its weight as a sum."""
    prefix = f"{fqn}." if fqn else ""
    names = [name for name in left if name.startswith(prefix) and _is_adapter(name.removeprefix(prefix))]
    own = {name: left.pop(name) for name in names}
    active = [] if layer.merged or layer.disable_adapters else [*layer.active_adapters]
    added = []
    for adapter in (
        adapter for adapter in active if adapter in layer.lora_A or adapter in layer.lora_embedding_A
    ):
        of_adapter = {name: taken for name, taken in own.items() if f".{adapter}." in f"{name}."}
        wanted = [f"{prefix}{part}.{adapter}.weight" for part in ("lora_A", "lora_B")]
        if [*of_adapter] != wanted or any(len(taken.shape) != 2 for taken in of_adapter.values()):
            raise ValueError(
                f"adapter '{adapter}' of '{fqn}' is not plain LoRA of a linear layer (it has "
                f"{', '.join(of_adapter)}): merge it by its own library before, or use adapters='apart'"
            )
        first, second = of_adapter.values()
        added.append(LowRank(first, second, float(layer.scaling[adapter])))
    if not added:
        return {}
    name = f"{prefix}{_BASE}.weight"
    base = left.pop(name)
    return {name: Merged(base, added, dtype or base.dtype, bool(getattr(layer, "fan_in_fan_out", False)))}


def _is_adapter(name: str) -> bool:
    return name.split(".")[0] in _PARTS


def _choose_saved(fqn: str, module: Any, left: dict[str, SourceTensor]) -> None:
    """Drops all copies of a module trained beside its original, except the active one."""
    prefix = f"{fqn}." if fqn else ""
    active = None if module.disable_adapters else next(iter(module.active_adapters), None)
    for name in [*left]:
        path = name.removeprefix(prefix).split(".")
        if name.startswith(prefix) and path[0] in (_SAVED, _ORIGINAL):
            used = path[0] == _ORIGINAL if active is None else path[:2] == [_SAVED, active]
            if not used:
                del left[name]


def _without_adapters(name: str) -> str:
    path = name.removeprefix(_AROUND).split(".")
    if _SAVED in path:
        place = path.index(_SAVED)
        del path[place : place + 2]
    return ".".join(part for part in path if part not in (_BASE, _ORIGINAL))
