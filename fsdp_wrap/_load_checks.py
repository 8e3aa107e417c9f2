"""Whether a model's state dict fits: told by name and shape before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import is_tensor_like

from fsdp_wrap._full_values import handles_of
from fsdp_wrap._interval_tensor import IntervalTensor
from fsdp_wrap._modules import WRAPPED_ATTR, clean_fqn, original_class
from fsdp_wrap._originals import indexed_names, names_of_places
from fsdp_wrap._unit import units_in
from fsdp_wrap._walks import walk
from fsdp_wrap.api import StateDictType

__all__ = ["check_fits", "key_problems", "refuse_problems"]


def check_fits(module: nn.Module, state_dict: Mapping[str, Any], strict: bool, kind: StateDictType) -> bool:
    """Refuses a state dict that does not fit, before anything is loaded.

    Returns:
        Whether it is sure to fit. What modules accept that load in a way of their own (hooks,
        `_load_from_state_dict`) shows only when they do.

    Raises:
        RuntimeError: Naming missing and unexpected keys (if `strict`) and tensors of another shape, as
            `torch.nn.Module.load_state_dict` does.
    """
    expected, own_way = _expected(module)
    given = {clean_fqn(key): value for key, value in state_dict.items()}
    intervals = _no_intervals if kind is StateDictType.FULL_STATE_DICT else _other_intervals
    problems = [*_other_shapes(expected, given), *intervals(module, given)]
    unexpected = [key for key in given if key not in expected and not key.startswith(own_way)]
    missing = [key for key in expected if key not in given]
    refuse_problems(module, [*problems, *key_problems(missing, unexpected)] if strict else problems)
    return not own_way


def key_problems(missing: list[str], unexpected: list[str]) -> Iterator[str]:
    """Yields complaints about names, as `torch.nn.Module.load_state_dict` words them."""
    if unexpected:
        yield f"Unexpected key(s) in state_dict: {_quoted(unexpected)}."
    if missing:
        yield f"Missing key(s) in state_dict: {_quoted(missing)}."


def refuse_problems(module: nn.Module, problems: Iterable[str]) -> None:
    """Refuses what is to be loaded.

    Raises:
        RuntimeError: If there are any problems.
    """
    details = "\n\t".join(problems)
    if details:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__} (nothing was loaded):\n\t{details}"
        )


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _other_shapes(expected: Mapping[str, torch.Size | None], given: Mapping[str, Any]) -> Iterator[str]:
    for key, shape in expected.items():
        value = given.get(key)
        if shape is not None and key in given and not is_tensor_like(value):  # type: ignore[no-untyped-call]
            yield f"While copying the parameter named {key}, expected a tensor, found {type(value).__name__}."
        found = getattr(value, "shape", None)
        scalar_as_vector = shape == torch.Size([]) and found == torch.Size([1])  # as torch 0.3 saved them
        if shape is not None and found is not None and found != shape and not scalar_as_vector:
            yield (
                f"size mismatch for {key}: copying a param with shape {found} from checkpoint, "
                f"the shape in current model is {shape}."
            )


def _no_intervals(module: nn.Module, given: Mapping[str, Any]) -> Iterator[str]:
    pieces = [name for name, value in given.items() if isinstance(value, IntervalTensor)]
    if pieces:
        yield (
            f"{_quoted(pieces)} are pieces of a sharded state dict: load it under "
            "FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
        )


def _other_intervals(module: nn.Module, given: Mapping[str, Any]) -> Iterator[str]:
    """Yields complaints about pieces of sharded state dicts that are not those which this rank holds."""
    if not any(isinstance(value, IntervalTensor) for value in given.values()):
        return
    names = names_of_places(module)
    for handle in handles_of(units_in(module).values()):
        for layout in (segment.layout for segment in handle.segments):
            intervals = layout.intervals()
            for index, name in indexed_names(layout, names):
                value, own = given.get(name), intervals[index]
                if isinstance(value, IntervalTensor) and (value.start, value.stop) != (own.start, own.stop):
                    yield (
                        f"elements {value.start} to {value.stop} of {name} were saved by this rank, which "
                        f"now holds {own.start} to {own.stop}; load through torch.distributed.checkpoint, "
                        "which fits them to other ranks and wrappings."
                    )


def _expected(module: nn.Module) -> tuple[dict[str, torch.Size | None], tuple[str, ...]]:
    """Returns full shapes by clean name (None: any value), and prefixes of modules that decide themselves."""
    full = _full_shapes(module)
    expected: dict[str, torch.Size | None] = {}
    own_way: list[str] = []
    for name, child in walk(module, all_names=True):
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
    overridden = original_class(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or bool(module._load_state_dict_pre_hooks)
