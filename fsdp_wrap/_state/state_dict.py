"""Model state dicts, full, sharded and local, under the names of the unwrapped module.

While a state dict is taken or loaded, the modules show parameters made for it: full copies, or
`IntervalTensor`s. So torch's own walk of the modules finds them, and with it the users' hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from fsdp_wrap._by_hand import note_change
from fsdp_wrap._core import (
    UNIT_ATTR,
    WRAPPED_ATTR,
    OptimStateDictConfig,
    Place,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    clean_fqn,
    joined,
    named,
    own_modules,
    params,
    walk,
)
from fsdp_wrap._params import (
    Buffers,
    IntervalTensor,
    LentParams,
    ShardedParams,
    Spread,
    distributed_names,
    to_local,
)
from fsdp_wrap._runtime import Unit, buffers_of, units_in
from fsdp_wrap._state.full_params import (
    dismiss,
    is_summoned,
    original_buffers,
    refuse_hidden,
    refuse_summoned,
    sharded_buffers,
    summon,
)
from fsdp_wrap._state.full_values import FirstRank, full_values, offloaded, stream, unsharded
from fsdp_wrap._state.load_targets import copies_values
from fsdp_wrap._state.originals import Original, originals_in, owned_names, owned_places, used_by
from fsdp_wrap._state.side_data import load_side_data


def by_mesh(settings: StateDictSettings, units: Iterable[Unit]) -> StateDictSettings:
    """Returns settings with sharded values as `DTensor`s, if one of the wrappers was given a mesh."""
    meshed = any(buffers.held_by.given is not None for buffers in buffers_of(units))
    if settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT or not meshed:
        return settings
    of_model, of_optim = settings.state_dict_config, settings.optim_state_dict_config
    return replace(
        settings,
        state_dict_config=replace(of_model, _use_dtensor=True),  # type: ignore[call-arg]
        optim_state_dict_config=replace(of_optim, _use_dtensor=True),  # type: ignore[call-arg]
    )


# saving


def wants_dtensors(config: StateDictConfig | OptimStateDictConfig) -> bool:
    """Whether sharded values are to be `DTensor`s of rows; else they are this rank's intervals."""
    return getattr(config, "_use_dtensor", False)


def only_rank(module: nn.Module, config: StateDictConfig | OptimStateDictConfig) -> FirstRank | None:
    """Returns the one rank that gets the result; None for all."""
    return FirstRank(module) if getattr(config, "rank0_only", False) else None


class Taking:
    """One outermost call of `state_dict()`, with the calls of wrappers below it, which add to `destination`.

    Copies and metadata are made once at its end: nested wrappers would each do it for all below.
    """

    def __init__(self, destination: dict[str, Any], module: nn.Module, prefix: str, wanted: bool) -> None:
        self.destination, self.wanted = destination, wanted
        self._module, self._prefix = module, prefix
        self._last = next(reversed(destination), None)
        self._aliased: dict[int, tuple[torch.Tensor, bool]] = {}

    @cached_property
    def names(self) -> dict[Place, list[str]]:
        """The names of each place in the result."""
        names: dict[Place, list[str]] = {}
        for fqn, place, _ in named(self._module, params, all_names=True):
            names.setdefault(place, []).append(self._prefix + fqn)
        return names

    def note_aliased(self, unit: Unit, to_host: bool) -> None:
        """Notes a unit's tensors, whose memory the result must not share in the end.

        These are its buffers, and its parameters, which the user may hold in full now. Ignored tensors stay
        those of the model, as in the state dict of a plain module, unless all is copied to the host.
        """
        tensors = _tensors(_modules(unit)) if to_host else _taken_tensors(unit)
        self._aliased.update((tensor.untyped_storage()._cdata, (tensor, to_host)) for tensor in tensors)

    def separate(self) -> None:
        """Copies the added tensors that share memory with the model."""
        state_dict = self.destination
        for key in list(takewhile(lambda key: key != self._last, reversed(state_dict))):
            value = state_dict[key]
            if key.startswith(self._prefix) and isinstance(value, torch.Tensor) and not value.is_meta:
                aliased = self._aliased.get(value.untyped_storage()._cdata)
                if aliased is not None:
                    state_dict[key] = offloaded(value, aliased[1])

    def add_metadata(self) -> None:
        """Adds versions under the names of wrapped modules too, which a plain module above looks up."""
        metadata = self.destination._metadata  # type: ignore[attr-defined]
        for name, _ in walk(self._module, all_names=True):
            plain = f"{name}.".replace(f"{WRAPPED_ATTR}.", "")
            versions = metadata.get(f"{self._prefix}{plain}".rstrip("."))
            if versions is not None:
                metadata.setdefault(f"{self._prefix}{name}".rstrip("."), versions)


_taking: ContextVar[Taking | None] = ContextVar("fsdp_wrap_taking", default=None)


def gathers(settings: StateDictSettings) -> bool:
    """Whether all ranks must take part in a state dict of this kind."""
    return settings.state_dict_type is StateDictType.FULL_STATE_DICT or wants_dtensors(
        settings.state_dict_config
    )


@contextmanager
def taking(destination: Any, module: nn.Module, prefix: str, wanted: bool) -> Iterator[tuple[Taking, bool]]:
    """Yields the running outermost call, and whether this call is it."""
    outer = _taking.get()
    if outer is not None and outer.destination is destination:
        yield outer, False
        return
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()
    call = Taking(destination, module, prefix, wanted)
    token = _taking.set(call)
    try:
        yield call, True
        call.separate()
        call.add_metadata()
    finally:
        _taking.reset(token)


def _taken_tensors(unit: Unit) -> Iterator[torch.Tensor]:
    """Yields the tensors of a wrapper's unit and of `fully_shard`'s units inside, as modules show them."""
    inside = (module.__dict__[UNIT_ATTR] for module in _modules(unit) if UNIT_ATTR in module.__dict__)
    units: list[Unit] = [unit, *inside]
    for module, name in owned_places(units):  # as modules show it now
        shown = module._parameters.get(name, module.__dict__.get(name))
        if shown is not None:
            yield shown
    for owner in units:
        yield from owner.buffer_casts.shown()


def _modules(unit: Unit) -> Iterator[nn.Module]:
    """Yields a wrapped module and its submodules, without other wrappers and what they contain."""
    return (
        module for _, module in walk(_wrapped(unit), into=lambda child: WRAPPED_ATTR not in child._modules)
    )


def _tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        tensors = (*module._parameters.values(), *module._buffers.values())
        yield from (tensor for tensor in tensors if tensor is not None)


def take_state_dict(
    unit: Unit,
    settings: StateDictSettings,
    call: Taking,
    *,
    only: FirstRank | None,
    prefix: str,
    keep_vars: bool,
) -> Any:
    """Adds the wrapped module's state dict to a call; tensors have no memory where they are not wanted."""
    module = _wrapped(unit)
    kind, offload = settings.state_dict_type, settings.state_dict_config.offload_to_cpu
    if kind is not StateDictType.FULL_STATE_DICT:
        refuse_summoned([unit], f"taking a state dict of type {kind.name}")
    if kind is StateDictType.LOCAL_STATE_DICT:
        _refuse_distributed(unit)
    with original_buffers([unit]):
        if not keep_vars and (offload or kind is StateDictType.FULL_STATE_DICT):
            call.note_aliased(unit, offload)
        with _replaced(unit, settings, only, keep_vars):
            destination = module.state_dict(destination=call.destination, prefix=prefix, keep_vars=keep_vars)
    if kind is StateDictType.LOCAL_STATE_DICT:
        _make_local(unit, call, destination, prefix, offload)
    return destination


@contextmanager
def _replaced(
    unit: Unit, settings: StateDictSettings, only: FirstRank | None, keep_vars: bool
) -> Iterator[None]:
    kind, offload = settings.state_dict_type, settings.state_dict_config.offload_to_cpu
    # Copies, as torch's: they keep today's values. Variables are the memory itself; local shards are copied
    # later.
    copied = offload or not (keep_vars or kind is StateDictType.LOCAL_STATE_DICT)
    all_buffers = _replaceable(unit)
    try:
        for buffers in all_buffers:
            if kind is StateDictType.FULL_STATE_DICT:
                _show(buffers, _full_copies(buffers, offload, only))
            elif wants_dtensors(settings.state_dict_config):
                _show(buffers, _rows(buffers, offload))
            else:
                _show(buffers, _saved_pieces(buffers, offload, copied))
        yield
    finally:
        for buffers in all_buffers:
            buffers.take_back()


def _replaceable(unit: Unit) -> list[Buffers]:
    """Reshards a unit and its lenders; returns their buffers, except those replaced already."""
    for used_unit in used_by([unit]):
        refuse_hidden(used_unit)
    return sharded_buffers([unit])


def _show(buffers: Buffers, values: Iterable[torch.Tensor]) -> None:
    """Shows other values in the place of sharded parameters, in the order of `originals_in`."""
    remaining = iter(values)
    shown = [
        [_as_param(sharded, index, next(remaining)) for index in range(len(sharded.layout.fqns))]
        for sharded in buffers.params
    ]
    buffers.lend(LentParams.others(buffers.params, shown))


def _as_param(sharded: ShardedParams, index: int, value: torch.Tensor) -> Any:
    """Returns a parameter of a value; a piece, which was made for this, becomes one itself."""
    trains, side = sharded.sources[index].requires_grad, sharded.side_data[index]
    if type(value) is not IntervalTensor:
        return sharded.parameter(index, value, trains)
    value._is_param = True
    if side is not None:
        side.put_on(value)
    return value.requires_grad_(trains)


def _full_copies(buffers: Buffers, offload: bool, only: FirstRank | None) -> Iterator[torch.Tensor]:
    values = full_values(buffers)
    # All at once, and small ones together: the caller keeps everything anyway.
    copies = stream(values, 2 * sum(value.nbytes for value in values), only=only, to_host=offload)
    return (copied for _, copied in copies)


def _saved_pieces(buffers: Buffers, offload: bool, copied: bool) -> Iterator[IntervalTensor]:
    for original in originals_in(buffers):
        held = original.interval.data
        yield original.piece(offloaded(held, offload) if copied else held)


def _rows(buffers: Buffers, offload: bool) -> Iterator[torch.Tensor]:
    """Yields this rank's rows of one parameter after the other; collective."""
    cut = [value for value in full_values(buffers) if value.whole is None]
    gathered = stream(cut, 2 * max((value.nbytes for value in cut), default=0))
    for original in originals_in(buffers):
        if original.wanted is not None:  # what a subclass holds has rows of its own
            yield original.piece(offloaded(original.interval.data, offload))
            continue
        rows = original.rows_of(next(gathered)[1])
        yield rows.cpu() if offload else rows


def _shard_copy(sharded: ShardedParams, to_host: bool = False) -> torch.Tensor:
    like = sharded.intervals()[0].data
    shard = torch.empty(
        sharded.layout.shard_numel, dtype=sharded.dtype, device="cpu" if to_host else like.device
    )
    sharded.write_shard(shard)
    return shard


def _refuse_distributed(unit: Unit) -> None:
    for buffers in buffers_of([unit]):
        distributed = distributed_names(buffers.params)
        if distributed:
            raise NotImplementedError(
                f"parameter '{unit.name_of(distributed[0])}' was distributed by tensor parallelism "
                "before it was wrapped, and no name tells flat shards of its parts apart: take a state dict "
                "of type SHARDED_STATE_DICT"
            )


def _make_local(unit: Unit, call: Taking, state_dict: dict[str, Any], prefix: str, offload: bool) -> None:
    for place in owned_places([unit]):  # some of them may be of units below
        for name in call.names.get(place, ()):
            state_dict.pop(name, None)
    for buffers in buffers_of([unit]):
        for sharded in buffers.params:
            state_dict[prefix + sharded.name] = _flat_shard(buffers, sharded, _shard_copy(sharded, offload))


def _flat_shard(buffers: Buffers, sharded: ShardedParams, shard: torch.Tensor) -> IntervalTensor:
    """Returns a shard as an interval of the flat buffer, so other ranks' shards are not taken for copies."""
    start = buffers.communicator.rank * sharded.layout.shard_numel
    spread = Spread(buffers.held_by, 0, sharded.layout.shard_numel)
    return IntervalTensor(torch.Size([sharded.layout.numel]), start, shard, spread=spread)


def _wrapped(unit: Unit) -> nn.Module:
    module = unit.module._modules[WRAPPED_ATTR]
    assert module is not None
    return module


# loading


def begin_load(
    unit: Unit,
    kind: StateDictType,
    state_dict: dict[str, Any],
    prefix: str,
    *,
    strict: bool,
    missing: list[str],
    errors: list[str],
    in_full: bool,
) -> Callable[[bool], None]:
    """Shows parameters for a unit's part of a state dict, whose values it converts in place.

    Modules that only copy full tensors copy them into `IntervalTensor`s; others see full parameters.

    Args:
        unit: The wrapper's unit.
        kind: The kind of the state dict.
        state_dict: By the unwrapped module's names.
        prefix: The prefix of the unit's names.
        strict: Whether names must match.
        missing: Gets the names of missing side data.
        errors: Gets a message for each flat shard and each kind of codes that does not fit.
        in_full: Whether a full state dict needs full parameters in any case.

    Returns:
        A function that shows the sharded parameters again: loaded, or with False as they were.
    """
    errors += _expand_local(unit.module, {"": unit}, state_dict, prefix)
    own = {module for _, module in own_modules(_wrapped(unit))}
    # Else other units' modules show them too.
    within = all(module in own for module, _ in owned_places([unit]))
    into = (lambda module: UNIT_ATTR not in module.__dict__) if within else None
    named_originals = [*owned_names(_wrapped(unit), [unit], into)]
    if any(prefix + name in state_dict for name, _ in named_originals):
        note_change([unit], "load", errors)
    for name, _ in named_originals:
        if prefix + name in state_dict:
            state_dict[prefix + name] = unsharded(state_dict[prefix + name])
    sides = ((prefix + name, original.side_data) for name, original in named_originals)
    load_side_data(
        ((key, side) for key, side in sides if side is not None), state_dict, strict, missing, errors
    )
    wrapped = f"{prefix}{WRAPPED_ATTR}."
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(wrapped):
            state_dict[wrapped + key[len(prefix) :]] = state_dict.pop(key)
    shown_in = (unit.module, *own) if within else unit.module.modules()
    if kind is not StateDictType.FULL_STATE_DICT:
        refuse_summoned([unit], f"loading a state dict of type {kind.name}")
    elif in_full or is_summoned(unit) or not all(map(copies_values, shown_in)):
        _distribute(named_originals, state_dict, wrapped)
        return _begin_full_load(unit)
    for name, original in named_originals:
        if wrapped + name in state_dict:
            state_dict[wrapped + name] = original.taken_apart(state_dict[wrapped + name])
    return _begin_sharded_load(unit)


def _distribute(originals: Iterable[tuple[str, Original]], state_dict: dict[str, Any], prefix: str) -> None:
    """Makes `DTensor`s of values for `DTensor` parameters: modules would not copy whole ones there."""
    for name, original in originals:
        part, value = original.interval.part, state_dict.get(prefix + name)
        if part is None or not isinstance(value, torch.Tensor) or to_local(value) is not value:
            continue
        if value.shape == part.shape:  # else the module refuses it
            state_dict[prefix + name] = part.tensor(part.cut(value).contiguous())


def _begin_full_load(unit: Unit) -> Callable[[bool], None]:
    """Shows full parameters while modules load into them; then each rank takes its part."""
    summoned = summon(unit)
    unit.buffer_casts.hold_original()

    def end(keep: bool) -> None:
        unit.buffer_casts.release()
        dismiss(summoned, writeback=keep)

    return end


def _begin_sharded_load(unit: Unit) -> Callable[[bool], None]:
    """Shows `IntervalTensor`s over copies of the shards while modules load into them; nothing is gathered."""
    staged: list[tuple[Buffers, list[torch.Tensor]]] = []
    for buffers in _replaceable(unit):
        shards = [_shard_copy(sharded) for sharded in buffers.params]
        cut = (
            held for sharded, shard in zip(buffers.params, shards) for held in sharded.layout.pieces(shard)
        )
        _show(buffers, map(Original.piece, originals_in(buffers), cut))
        staged.append((buffers, shards))
    unit.buffer_casts.hold_original()

    def end(keep: bool) -> None:
        unit.buffer_casts.release()
        for buffers, shards in staged:
            buffers.take_back()
            for sharded, shard in zip(buffers.params, shards) if keep else ():
                sharded.read_shard(shard)

    return end


def to_load(module: nn.Module, state_dict: Mapping[str, Any]) -> tuple[OrderedDict[str, Any], list[str]]:
    """Returns a copy with pieces in place of flat shards and current names of versions, and problems."""
    copied: OrderedDict[str, Any] = OrderedDict(state_dict)
    metadata = getattr(state_dict, "_metadata", {})
    names = [name for name, _ in walk(module, all_names=True)]
    copied._metadata = {name: metadata.get(clean_fqn(name), {}) for name in names}  # type: ignore[attr-defined]
    return copied, _expand_local(module, units_in(module), copied)


def _expand_local(
    module: nn.Module, units: Mapping[str, Unit], state_dict: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Replaces flat shards by their pieces, in place; keeps shards that do not fit, and returns errors."""
    problems: list[str] = []
    pieces: dict[ShardedParams | None, list[torch.Tensor]] = {}
    for key, buffers, sharded in _shard_names(units, prefix):
        if key not in state_dict:
            continue
        own = _flat_shard(buffers, sharded, torch.empty(sharded.layout.shard_numel, device="meta"))
        given = state_dict[key]
        plain = isinstance(given, torch.Tensor) and not isinstance(given, IntervalTensor) and given.dim() == 1
        saved = own.with_piece(given) if plain else given
        if not isinstance(saved, IntervalTensor):
            content = f"a {type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}"
        elif (saved.shape, saved.start, saved.stop) == (own.shape, own.start, own.stop):
            pieces[sharded] = sharded.layout.pieces(saved.piece)
            del state_dict[key]
            continue
        else:
            content = f"elements {saved.start} to {saved.stop} of {saved.numel()}"
        problems.append(
            f"size mismatch for {key}: the checkpoint has {content}, this rank elements {own.start} to "
            f"{own.stop} of {own.numel()}. A local state dict fits only the ranks and wrapping that it was "
            "saved with; save a sharded one"
        )
    for name, original in owned_names(module, units.values()) if pieces else ():
        if original.sharded in pieces:
            state_dict[prefix + name] = original.piece(pieces[original.sharded][original.index])
    return problems


def _shard_names(units: Mapping[str, Unit], prefix: str) -> Iterator[tuple[str, Buffers, ShardedParams]]:
    for fqn, unit in units.items():
        for buffers in buffers_of([unit]):
            for sharded in buffers.params:
                yield prefix + joined(fqn, sharded.name), buffers, sharded
