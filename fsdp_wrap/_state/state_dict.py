"""Model state dicts, full, sharded and local, under the names of the unwrapped module.

While a state dict is taken or loaded, the modules show parameters made for it, so torch's own walk of the
modules, and with it the users' hooks, finds what it is to contain: full copies, or `IntervalTensor`s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import (
    UNIT_ATTR,
    WRAPPED_ATTR,
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
    WrongConfigError,
    check_kind,
    clean_fqn,
    own_modules,
    walk,
)
from fsdp_wrap._params import IntervalTensor, Layout, ParamHandle, Spread
from fsdp_wrap._runtime import Unit
from fsdp_wrap._state.full_params import (
    dismiss,
    is_summoned,
    original_buffers,
    refuse_hidden,
    refuse_summoned,
    sharded_handles,
    summon,
)
from fsdp_wrap._state.full_values import (
    full_values,
    handles_of,
    is_first_rank,
    is_sharded,
    offloaded,
    unsharded,
    used_by,
)
from fsdp_wrap._state.load_targets import copies_values
from fsdp_wrap._state.originals import owned_names, owned_places, piece_of
from fsdp_wrap._state.streaming import stream
from fsdp_wrap._state.taking import Taking

__all__ = [
    "FullLoad",
    "ShardedLoad",
    "add_wrapped_prefix",
    "begin_load",
    "clean_keys",
    "default_settings",
    "expand_local",
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
    check_kind("state_dict_type", kind, StateDictType, optional=False)
    config_type, optim_type = _CONFIGS[kind]
    config = config_type() if config is None else config
    optim_config = optim_type() if optim_config is None else optim_config
    for name, given, wanted in (
        ("state_dict_config", config, config_type),
        ("optim_state_dict_config", optim_config, optim_type),
    ):
        if type(given) is not wanted:
            if type(given).__name__ == wanted.__name__:  # of another package
                check_kind(name, given, wanted)
            raise WrongConfigError(f"{kind.name} takes a {wanted.__name__} as {name}, not {given!r}")
        if getattr(given, "_use_dtensor", False):
            raise ValueError(
                f"{name} asks for _use_dtensor; leave it out and convert by IntervalTensor.to_dtensor()"
            )
    return StateDictSettings(kind, config, optim_config)


# saving


def wants_result(module: nn.Module, config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Whether this rank is to get what is saved of the units in `module`."""
    rank0_only = getattr(config, "rank0_only", False)
    units = (each.__dict__[UNIT_ATTR] for _, each in walk(module) if UNIT_ATTR in each.__dict__)
    return not rank0_only or is_first_rank(unit.handle for unit in units if unit.handle)  # asks the first one


def take_state_dict(
    unit: Unit,
    settings: StateDictSettings,
    call: Taking,
    *,
    wanted: bool,
    prefix: str,
    keep_vars: bool,
) -> Any:
    """Lets the wrapped module make its state dict while it shows what that is to contain.

    Args:
        unit: The wrapper's unit.
        settings: Which kind of state dict.
        call: To whose result it adds.
        wanted: Whether this rank keeps it; otherwise its tensors have no memory.
        prefix: As in `torch.nn.Module.state_dict`.
        keep_vars: As there.
    """
    module = _wrapped(unit)
    kind, offload = settings.state_dict_type, settings.state_dict_config.offload_to_cpu
    if kind is not StateDictType.FULL_STATE_DICT:
        refuse_summoned(unit, f"taking a state dict of type {kind.name}")
    with original_buffers([unit]):
        if not keep_vars and (offload or kind is StateDictType.FULL_STATE_DICT):
            call.note_aliased(unit, offload)
        with _replaced(unit, settings, wanted, keep_vars):
            destination = module.state_dict(destination=call.destination, prefix=prefix, keep_vars=keep_vars)
    if kind is StateDictType.LOCAL_STATE_DICT:
        _make_local(unit, call, destination, prefix, offload)
    return destination


@contextmanager
def _replaced(unit: Unit, settings: StateDictSettings, wanted: bool, keep_vars: bool) -> Iterator[None]:
    kind, offload = settings.state_dict_type, settings.state_dict_config.offload_to_cpu
    with ExitStack() as stack:
        for handle in _replaceable(unit):
            if kind is StateDictType.FULL_STATE_DICT:
                _show(handle, _full_copies(handle, offload, wanted))
            else:
                # Copies, as torch's: who keeps them keeps the values of now. Variables are the memory itself.
                local = kind is StateDictType.LOCAL_STATE_DICT  # of which copies follow
                _show(handle, _saved_pieces(handle, offload, offload or not (keep_vars or local)))
            stack.callback(handle.end_replacement)
        yield


def _replaceable(unit: Unit) -> list[ParamHandle]:
    """Returns the handles, sharded, of what a unit uses, save those that show something else already."""
    for each in used_by([unit]):
        refuse_hidden(each)
    return sharded_handles([unit])


def _show(handle: ParamHandle, values: Iterable[Iterable[torch.Tensor]]) -> None:
    """Shows other values, given by segment, in the place of sharded parameters."""
    handle.replace(
        [
            [
                nn.Parameter(value, requires_grad=source.requires_grad)
                for value, source in zip(of_segment, segment.layout.sources)
            ]
            for of_segment, segment in zip(values, handle.segments)
        ]
    )


def _full_copies(handle: ParamHandle, offload: bool, wanted: bool) -> list[list[torch.Tensor]]:
    values = [value for segment in handle.segments for value in full_values(handle, segment)]
    # All at once, and small ones together: the caller keeps everything anyway.
    copies = stream(values, 2 * sum(value.nbytes for value in values), wanted=wanted, to_host=offload)
    return [[next(copies)[1] for _ in segment.layout.sources] for segment in handle.segments]


def _saved_pieces(handle: ParamHandle, offload: bool, copied: bool) -> Iterator[list[IntervalTensor]]:
    for layout in (segment.layout for segment in handle.segments):
        held = [interval.data for interval in layout.intervals()]
        yield _pieces(handle, layout, [offloaded(each, offload) for each in held] if copied else held)


def _pieces(handle: ParamHandle, layout: Layout, held: Iterable[torch.Tensor]) -> list[IntervalTensor]:
    intervals = layout.intervals()
    return [piece_of(handle, layout, each, data.reshape(-1)) for each, data in zip(intervals, held)]


def _shard_copy(layout: Layout, to_host: bool = False) -> torch.Tensor:
    like = layout.intervals()[0].data
    shard = torch.empty(layout.shard_numel, dtype=layout.dtype, device="cpu" if to_host else like.device)
    layout.write_shard(shard)
    return shard


def _make_local(unit: Unit, call: Taking, state_dict: dict[str, Any], prefix: str, offload: bool) -> None:
    for place in owned_places([unit]):
        for name in call.names.get(place, ()):
            state_dict.pop(name, None)
    for handle in handles_of([unit]):
        for segment in handle.segments:
            shard = _shard_copy(segment.layout, offload)
            state_dict[prefix + segment.layout.name] = _flat_shard(handle, segment.layout, shard)


def _flat_shard(handle: ParamHandle, layout: Layout, shard: torch.Tensor) -> IntervalTensor:
    """Returns a shard as what it is of the flat buffer: other ranks' are not taken for copies of it."""
    start = handle.communicator.rank * layout.shard_numel
    spread = Spread(handle.held_by, 0, layout.shard_numel)
    return IntervalTensor(torch.Size([layout.numel]), start, shard, spread=spread)


def _wrapped(unit: Unit) -> nn.Module:
    module = unit.module._modules[WRAPPED_ATTR]
    assert module is not None
    return module


# loading


class FullLoad:
    """Full parameters, shown while modules load into them; then each rank takes its part."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._summoned = unit, summon(unit)
        unit.buffers.hold_original()

    def end(self, keep: bool) -> None:
        """Shows the sharded parameters again, with what was loaded or as they were."""
        self._unit.buffers.release()
        dismiss(self._summoned, writeback=keep)


class ShardedLoad:
    """Copies of the shards, shown as `IntervalTensor`s while modules load into them; nothing is gathered."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._staged: list[tuple[ParamHandle, list[torch.Tensor]]] = []
        for handle in _replaceable(unit):
            shards = [_shard_copy(segment.layout) for segment in handle.segments]
            layouts = (segment.layout for segment in handle.segments)
            _show(handle, (_pieces(handle, each, each.pieces(shard)) for each, shard in zip(layouts, shards)))
            self._staged.append((handle, shards))
        unit.buffers.hold_original()

    def end(self, keep: bool) -> None:
        """Shows the sharded parameters again, with what was loaded or as they were."""
        self._unit.buffers.release()
        for handle, shards in self._staged:
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
        plain = not in_full and not is_summoned(unit) and all(map(copies_values, _shown_in(unit)))
        return ShardedLoad(unit) if plain else FullLoad(unit)
    refuse_summoned(unit, f"loading a state dict of type {kind.name}")
    return ShardedLoad(unit)


def _shown_in(unit: Unit) -> Iterable[nn.Module]:
    """Returns the modules that may see a unit's parameters while they load."""
    own = {each for _, each in own_modules(_wrapped(unit))}
    within = all(module in own for module, _ in owned_places([unit]))
    return (unit.module, *own) if within else unit.module.modules()


def expand_local(
    module: nn.Module, units: Mapping[str, Unit], state_dict: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Replaces, in place, flat shards by the pieces that they consist of.

    Args:
        module: The module that is loaded.
        units: Those of its units that are concerned, by name.
        state_dict: Of it.
        prefix: Of its names.

    Returns:
        What is wrong with shards that do not fit; those stay.
    """
    problems: list[str] = []
    pieces: dict[Layout, list[IntervalTensor]] = {}
    for fqn, unit in units.items():
        for handle, layout in ((h, segment.layout) for h in handles_of([unit]) for segment in h.segments):
            key = f"{prefix}{fqn}.{layout.name}" if fqn else prefix + layout.name
            if key not in state_dict:
                continue
            shard, problem = _own_shard(key, state_dict[key], handle, layout)
            if shard is None:
                problems.append(problem)
                continue
            del state_dict[key]
            pieces[layout] = _pieces(handle, layout, layout.pieces(shard))
    for name, own in owned_names(module, units.values()) if pieces else ():
        if own.segment.layout in pieces:
            state_dict[prefix + name] = pieces[own.segment.layout][own.index]
    return problems


def _own_shard(key: str, value: Any, handle: ParamHandle, layout: Layout) -> tuple[torch.Tensor | None, str]:
    """Returns a saved flat shard if it is this rank's of this layout, else what is wrong with it."""
    own = _flat_shard(handle, layout, torch.empty(layout.shard_numel, device="meta"))
    as_piece = isinstance(value, IntervalTensor)
    shape, wanted = getattr(value, "shape", None), own.shape if as_piece else own.piece.shape
    if shape != wanted:
        problem = f"has a shard of shape {shape}, this rank's is {tuple(wanted)}"
    elif as_piece and (value.start, value.stop) != (own.start, own.stop):
        problem = f"has elements {value.start} to {value.stop}, this rank's are {own.start} to {own.stop}"
    else:
        return value.piece if as_piece else value, ""
    return None, (
        f"size mismatch for {key}: the checkpoint {problem}. A local state dict fits only the ranks and "
        "wrapping that it was saved with; save a sharded one"
    )


def unshard_values(unit: Unit, state_dict: dict[str, Any], prefix: str) -> None:
    """Replaces, in place, torch's own kinds of sharded tensors by full ones, where a unit's modules load."""
    for name, _ in owned_names(_wrapped(unit), [unit], into=_is_no_unit):
        if is_sharded(state_dict.get(prefix + name)):
            state_dict[prefix + name] = unsharded(state_dict[prefix + name])


def _is_no_unit(module: nn.Module) -> bool:
    return UNIT_ATTR not in module.__dict__


# names


def add_wrapped_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Renames, in place, the clean keys below `prefix` to those of the wrapped module."""
    wrapped = f"{prefix}{WRAPPED_ATTR}."
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(wrapped):
            state_dict[wrapped + key[len(prefix) :]] = state_dict.pop(key)


def with_wrapped_metadata(module: nn.Module, state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Returns a copy whose module versions stand under the names that `module` has now."""
    copied: OrderedDict[str, Any] = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", {})
    names = [name for name, _ in walk(module, all_names=True)]
    copied._metadata = {name: metadata.get(clean_fqn(name), {}) for name in names}  # type: ignore[attr-defined]
    return copied


def clean_keys(keys: list[str]) -> None:
    """Removes wrapper prefixes, in place, from names that were added to a list since it was clean."""
    for index in range(len(keys) - 1, -1, -1):
        clean = clean_fqn(keys[index])
        if clean == keys[index]:  # a wrapper further down has cleaned this and all before
            return
        keys[index] = clean
