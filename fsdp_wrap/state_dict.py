"""Model state dicts of full tensors, under the names of the unwrapped module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_wrap._modules import WRAPPED_ATTR, clean_fqn
from fsdp_wrap._unit import units_in

__all__ = ["add_wrapped_metadata", "add_wrapped_prefix", "check_fits", "clean_keys", "separate"]


def add_wrapped_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Renames, in place, the clean keys below `prefix` to those of the wrapped module."""
    wrapped = f"{prefix}{WRAPPED_ATTR}."
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(wrapped):
            state_dict[wrapped + key[len(prefix) :]] = state_dict.pop(key)


def add_wrapped_metadata(metadata: dict[str, Any], prefix: str) -> None:
    """Adds versions under the names of the wrapped module, which a plain module above looks for."""
    for key in [key for key in metadata if f"{key}.".startswith(prefix)]:
        metadata.setdefault(f"{prefix}{WRAPPED_ATTR}.{key[len(prefix) :]}".rstrip("."), metadata[key])


def with_wrapped_metadata(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a copy whose module versions stand under the names that `module` has now."""
    copied: OrderedDict[str, Any] = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", {})
    names = [name for name, _ in module.named_modules()]
    copied._metadata = {name: metadata.get(clean_fqn(name), {}) for name in names}  # type: ignore[attr-defined]
    return copied


def separate(state_dict: dict[str, Any], prefix: str, aliased: Iterable[torch.Tensor]) -> None:
    """Replaces, in place, values below `prefix` that share memory with tensors of the model by copies."""
    shared = {tensor.untyped_storage()._cdata for tensor in aliased}
    for key, value in state_dict.items():
        below = key.startswith(prefix) and isinstance(value, torch.Tensor)
        if below and value.untyped_storage()._cdata in shared:
            state_dict[key] = value.clone()


def clean_keys(keys: list[str]) -> None:
    """Removes wrapper prefixes from a list of names, in place."""
    keys[:] = [clean_fqn(key) for key in keys]


def check_fits(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> bool:
    """Refuses a state dict of full tensors that does not fit, before anything is loaded.

    Returns:
        Whether it is sure to fit. What modules accept that load in a way of their own (hooks,
        `_load_from_state_dict`) shows only when they do.

    Raises:
        RuntimeError: Naming missing and unexpected keys (if `strict`) and tensors of another shape, as
            `torch.nn.Module.load_state_dict` does.
    """
    expected, own_way = _expected(module)
    given = {clean_fqn(key): value for key, value in state_dict.items()}
    problems = list(_other_shapes(expected, given))
    if strict:
        unexpected = [key for key in given if key not in expected and not key.startswith(own_way)]
        missing = [key for key in expected if key not in given]
        problems += [f"Unexpected key(s) in state_dict: {_quoted(unexpected)}."] if unexpected else []
        problems += [f"Missing key(s) in state_dict: {_quoted(missing)}."] if missing else []
    if problems:
        details = "\n\t".join(problems)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__} (nothing was loaded):\n\t{details}"
        )
    return not own_way


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _other_shapes(expected: Mapping[str, torch.Size | None], given: Mapping[str, Any]) -> Iterator[str]:
    for key, shape in expected.items():
        value = given.get(key)
        if shape is not None and key in given and not isinstance(value, torch.Tensor):
            yield f"While copying the parameter named {key}, expected a tensor, found {type(value).__name__}."
        found = getattr(value, "shape", None)
        scalar_as_vector = shape == torch.Size([]) and found == torch.Size([1])  # as torch 0.3 saved them
        if shape is not None and found is not None and found != shape and not scalar_as_vector:
            yield (
                f"size mismatch for {key}: copying a param with shape {found} from checkpoint, "
                f"the shape in current model is {shape}."
            )


def _expected(module: nn.Module) -> tuple[dict[str, torch.Size | None], tuple[str, ...]]:
    """Returns full shapes by clean name (None: any value), and prefixes of modules that decide themselves."""
    full = _full_shapes(module)
    expected: dict[str, torch.Size | None] = {}
    own_way: list[str] = []
    for name, child in module.named_modules(remove_duplicate=False):
        prefix = clean_fqn(f"{name}.") if name else ""
        if _loads_its_own_way(child):
            own_way.append(prefix)
            continue
        for key, shape in _entries(child, full):
            expected[prefix + key] = shape
    taken = tuple(own_way)
    return {key: shape for key, shape in expected.items() if not key.startswith(taken)}, taken


def _full_shapes(module: nn.Module) -> dict[tuple[nn.Module, str], torch.Size]:
    return {
        place: extent
        for unit in units_in(module).values()
        if unit.handle is not None
        for segment in unit.handle.segments
        for place, extent in segment.layout.shapes().items()
    }


def _entries(
    module: nn.Module, full: Mapping[tuple[nn.Module, str], torch.Size]
) -> Iterator[tuple[str, torch.Size | None]]:
    for name, param in module._parameters.items():
        if (module, name) in full:
            yield name, full[module, name]
        elif param is not None and not name.startswith("_flat_param"):
            yield name, param.shape
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer.shape
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state", None


def _loads_its_own_way(module: nn.Module) -> bool:
    if WRAPPED_ATTR in module._modules:
        return False
    overridden = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or bool(module._load_state_dict_pre_hooks)
