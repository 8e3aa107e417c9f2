"""Model state dicts, full, sharded and local, under the names of the unwrapped module.

While a state dict is taken or loaded, the modules show parameters made for it, so torch's own walk of the
modules, and with it the users' hooks, finds what it is to contain: full copies, or `IntervalTensor`s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import is_tensor_like

from fsdp_wrap._full_values import full_values, handles_of, is_first_rank, is_sharded, offloaded, unsharded
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._interval_tensor import IntervalTensor
from fsdp_wrap._layout import Layout
from fsdp_wrap._load_parts import copies_values
from fsdp_wrap._modules import WRAPPED_ATTR, Place, clean_fqn, original_class
from fsdp_wrap._streaming import stream
from fsdp_wrap._unit import Unit, units_in
from fsdp_wrap.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_wrap.full_params import dismiss, is_summoned, original_buffers, refuse_hidden, summon

__all__ = [
    "FullLoad",
    "ShardedLoad",
    "add_wrapped_metadata",
    "add_wrapped_prefix",
    "begin_load",
    "check_fits",
    "clean_keys",
    "default_settings",
    "expand_local",
    "key_problems",
    "refuse_problems",
    "resolve_settings",
    "take_state_dict",
    "unshard_values",
    "wants_result",
    "with_wrapped_metadata",
]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Returns the settings of a module for which none were chosen."""
    return resolve_settings(StateDictType.FULL_STATE_DICT, None, None)


def resolve_settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Checks configurations and completes them by their defaults.

    Raises:
        TypeError: If an argument is of another type than the kind of state dict wants.
        ValueError: If `_use_dtensor` is set.
    """
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type must be a StateDictType, not {kind!r}")
    config_type, optim_type = _CONFIGS[kind]
    config = config_type() if config is None else config
    optim_config = optim_type() if optim_config is None else optim_config
    for name, given, wanted in (
        ("state_dict_config", config, config_type),
        ("optim_state_dict_config", optim_config, optim_type),
    ):
        if type(given) is not wanted:
            raise TypeError(f"{kind.name} takes a {wanted.__name__} as {name}, not {given!r}")
        if getattr(given, "_use_dtensor", False):
            raise ValueError(
                f"{name} asks for _use_dtensor; leave it out and convert by IntervalTensor.to_dtensor()"
            )
    return StateDictSettings(kind, config, optim_config)


# saving


def wants_result(module: nn.Module, config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Whether this rank is to get what is saved of the units in `module`."""
    rank0_only = getattr(config, "rank0_only", False)
    return not rank0_only or is_first_rank(handles_of(units_in(module).values()))


def take_state_dict(
    unit: Unit,
    settings: StateDictSettings,
    *,
    wanted: bool,
    destination: Any,
    prefix: str,
    keep_vars: bool,
) -> Any:
    """Lets the wrapped module make its state dict while it shows what that is to contain.

    Args:
        unit: The wrapper's unit.
        settings: Which kind of state dict.
        wanted: Whether this rank keeps it; otherwise its tensors have no memory.
        destination: As in `torch.nn.Module.state_dict`.
        prefix: As there.
        keep_vars: As there.
    """
    module = unit.module._modules[WRAPPED_ATTR]
    assert module is not None
    kind, offload = settings.state_dict_type, settings.state_dict_config.offload_to_cpu
    if kind is not StateDictType.FULL_STATE_DICT and is_summoned(unit):
        raise RuntimeError(
            f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
            f"before taking a state dict of type {kind.name}"
        )
    with original_buffers([unit]):
        live = [*module.buffers(), *module.parameters()]
        with _replaced(unit, settings, wanted):
            destination = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    if not keep_vars and (offload or kind is StateDictType.FULL_STATE_DICT):
        _separate(destination, prefix, live, offload)
    if kind is StateDictType.LOCAL_STATE_DICT:
        _make_local(unit, module, destination, prefix, offload)
    return destination


@contextmanager
def _replaced(unit: Unit, settings: StateDictSettings, wanted: bool) -> Iterator[None]:
    replaced: list[ParamHandle] = []
    offload = settings.state_dict_config.offload_to_cpu
    try:
        for handle in _replaceable(unit):
            if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
                shown = _full_params(handle, offload, wanted)
            else:
                shown = [_interval_params(segment.layout, offload) for segment in handle.segments]
            handle.replace(shown)
            replaced.append(handle)
        yield
    finally:
        for handle in replaced:
            handle.end_replacement()


def _replaceable(unit: Unit) -> Iterator[ParamHandle]:
    """Yields the handles, sharded, of what a unit uses, save those that show something else already."""
    for each in (*unit.lenders, unit):
        refuse_hidden(each)
    for handle in handles_of((*unit.lenders, unit)):
        if handle.settle():
            yield handle


def _full_params(handle: ParamHandle, offload: bool, wanted: bool) -> list[list[nn.Parameter]]:
    """Returns full copies of a unit's parameters, by segment."""
    segments = handle.segments
    values = [value for segment in segments for value in full_values(handle, segment)]
    copies = stream(values, sum(value.nbytes for value in values), wanted=wanted, to_host=offload)
    return [
        [
            nn.Parameter(next(copies)[1], requires_grad=source.requires_grad)
            for source in segment.layout.sources
        ]
        for segment in segments
    ]


def _interval_params(
    layout: Layout, offload: bool = False, pieces: Sequence[torch.Tensor] | None = None
) -> list[nn.Parameter]:
    intervals = layout.intervals()
    values = [interval.data for interval in intervals] if pieces is None else pieces
    return [
        nn.Parameter(
            IntervalTensor(
                interval.shape, interval.start, offloaded(value, True) if offload else value.reshape(-1)
            ),
            requires_grad=interval.source.requires_grad,
        )
        for interval, value in zip(intervals, values)
    ]


def _shard_copy(layout: Layout, to_host: bool = False) -> torch.Tensor:
    like = layout.intervals()[0].data
    shard = torch.empty(layout.shard_numel, dtype=layout.dtype, device="cpu" if to_host else like.device)
    layout.write_shard(shard)
    return shard


def _make_local(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, offload: bool
) -> None:
    names = _names_of_places(module)
    for handle in handles_of((*unit.lenders, unit)):
        for name in (name for segment in handle.segments for name in _names_in(segment.layout, names)):
            state_dict.pop(prefix + name, None)
    for handle in handles_of([unit]):
        for segment in handle.segments:
            state_dict[prefix + segment.layout.name] = _shard_copy(segment.layout, offload)


def _names_of_places(module: nn.Module) -> dict[Place, list[str]]:
    """Returns the clean names under which every place in a module shows a parameter."""
    names: dict[Place, list[str]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in child._parameters:
            full = clean_fqn(f"{prefix}.{name}" if prefix else name)
            names.setdefault((child, name), []).append(full)
    return names


def _indexed_names(layout: Layout, names: Mapping[Place, list[str]]) -> Iterator[tuple[int, str]]:
    """Yields (index of an original parameter, name) for every name of every place."""
    for index, places in enumerate(layout.places):
        for place in places:
            for name in names.get(place, ()):
                yield index, name


def _names_in(layout: Layout, names: Mapping[Place, list[str]]) -> Iterator[str]:
    for _, name in _indexed_names(layout, names):
        yield name


# loading


class FullLoad:
    """Full parameters, shown while modules load into them; then each rank takes its part."""

    def __init__(self, unit: Unit) -> None:
        self._units = summon(unit)

    def end(self, keep: bool) -> None:
        """Shows the sharded parameters again, with what was loaded or as they were."""
        units, self._units = self._units, []
        dismiss(units, writeback=keep)


class ShardedLoad:
    """Copies of the shards, shown as `IntervalTensor`s while modules load into them; nothing is gathered."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._staged: list[tuple[ParamHandle, list[torch.Tensor]]] = []
        unit.buffers.hold_original()
        for handle in _replaceable(unit):
            shards = [_shard_copy(segment.layout) for segment in handle.segments]
            handle.replace(
                [
                    _interval_params(segment.layout, pieces=segment.layout.pieces(shard))
                    for segment, shard in zip(handle.segments, shards)
                ]
            )
            self._staged.append((handle, shards))

    def end(self, keep: bool) -> None:
        """Shows the sharded parameters again, with what was loaded or as they were."""
        staged, self._staged = self._staged, []
        self._unit.buffers.release()
        for handle, shards in staged:
            handle.end_replacement()
            for segment, shard in zip(handle.segments, shards) if keep else ():
                segment.layout.read_shard(shard)


def begin_load(unit: Unit, kind: StateDictType, in_full: bool) -> FullLoad | ShardedLoad:
    """Shows what a state dict of a kind is loaded into.

    Modules that only copy full tensors may as well copy them into what cuts them; others see full parameters.

    Args:
        unit: The wrapper's unit.
        kind: Of the state dict.
        in_full: Whether a full state dict needs full parameters in any case.

    Raises:
        RuntimeError: If the user holds the full parameters and the kind needs the sharded ones.
    """
    if kind is StateDictType.FULL_STATE_DICT:
        plain = not in_full and not is_summoned(unit) and all(map(copies_values, unit.module.modules()))
        return ShardedLoad(unit) if plain else FullLoad(unit)
    if is_summoned(unit):
        raise RuntimeError(
            f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
            f"before loading a state dict of type {kind.name}"
        )
    return ShardedLoad(unit)


def expand_local(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> list[str]:
    """Replaces, in place, flat shards of the units in `module` by the pieces that they consist of.

    Returns:
        What is wrong with shards that do not fit; those stay.
    """
    problems: list[str] = []
    names: dict[Place, list[str]] = {}
    for fqn, unit in units_in(module).items():
        for layout in (segment.layout for handle in handles_of([unit]) for segment in handle.segments):
            key = f"{prefix}{fqn}.{layout.name}" if fqn else prefix + layout.name
            if key not in state_dict:
                continue
            shape = getattr(state_dict[key], "shape", None)
            if shape != (layout.shard_numel,):
                problems.append(
                    f"size mismatch for {key}: the checkpoint has a shard of shape {shape}, this rank's is "
                    f"({layout.shard_numel},). A local state dict fits only the ranks and wrapping that it "
                    "was saved with; save a sharded one"
                )
                continue
            names = names or _names_of_places(module)
            params = _interval_params(layout, pieces=layout.pieces(state_dict.pop(key)))
            for index, name in _indexed_names(layout, names):
                state_dict[prefix + name] = params[index].detach()
    return problems


def unshard_values(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replaces, in place, torch's own kinds of sharded tensors for a unit's parameters by full ones."""
    if not any(is_sharded(value) for value in state_dict.values()):
        return
    names = _names_of_places(module)
    for handle in handles_of((*unit.lenders, unit)):
        for name in (name for segment in handle.segments for name in _names_in(segment.layout, names)):
            if prefix + name in state_dict:
                state_dict[prefix + name] = unsharded(state_dict[prefix + name])


# names


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


def with_wrapped_metadata(module: nn.Module, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Returns a copy whose module versions stand under the names that `module` has now."""
    copied: OrderedDict[str, Any] = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", {})
    names = [name for name, _ in module.named_modules()]
    copied._metadata = {name: metadata.get(clean_fqn(name), {}) for name in names}  # type: ignore[attr-defined]
    return copied


def _separate(
    state_dict: dict[str, Any], prefix: str, aliased: Iterable[torch.Tensor], to_host: bool
) -> None:
    """Replaces, in place, values below `prefix` that share memory with tensors of the model by copies."""
    shared = {tensor.untyped_storage()._cdata for tensor in aliased}
    for key, value in state_dict.items():
        below = key.startswith(prefix) and isinstance(value, torch.Tensor)
        if below and not value.is_meta and value.untyped_storage()._cdata in shared:
            state_dict[key] = offloaded(value, to_host)


def clean_keys(keys: list[str]) -> None:
    """Removes wrapper prefixes from a list of names, in place."""
    keys[:] = [clean_fqn(key) for key in keys]


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
    names = _names_of_places(module)
    for handle in handles_of(units_in(module).values()):
        for layout in (segment.layout for segment in handle.segments):
            intervals = layout.intervals()
            for index, name in _indexed_names(layout, names):
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
    overridden = original_class(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or bool(module._load_state_dict_pre_hooks)
