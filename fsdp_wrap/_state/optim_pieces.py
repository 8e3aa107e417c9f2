"""Optimizer state on all ranks: what each has of it, told to the others; put together, or cut anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.full_values import FullValue, copier, stream
from fsdp_wrap._state.optim_params import rank, same_values
from fsdp_wrap._state.originals import Original, Originals, handles_of
from fsdp_wrap._state.small_states import SCALE, block_of

State = dict[str, Any]


@dataclass(frozen=True)
class _Extent:
    """Which elements of a full tensor a rank has."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


def _told(entry: Mapping[str, Any]) -> State:
    """Describes pieces; what is whole and no mere count each rank has itself, and is not sent."""
    told: State = {}
    for key, value in entry.items():
        if isinstance(value, IntervalTensor):
            told[key] = _Extent(value.shape, value.dtype, value.start, value.stop)
        elif not isinstance(value, torch.Tensor) or value.dim() == 0:
            told[key] = value
    return told


def _together(
    original: Original, communicator: Communicator, told: Sequence[Mapping[str, Any]], own: Mapping[str, Any]
) -> State:
    """Returns the state of one parameter: a `FullValue` of what is cut, the value of all else.

    Args:
        original: The parameter.
        communicator: Of the ranks that hold it between them.
        told: What each has of its state.
        own: This rank's pieces and values.

    Raises:
        ValueError: If the ranks do not hold all of a tensor between them, each a part behind the one before.
    """
    found: State = {}
    for key, value in {key: value for entry in reversed(told) for key, value in entry.items()}.items():
        extents = [entry.get(key) for entry in told]
        if any(isinstance(extent, _Extent) for extent in extents):
            found[key] = _full_value(original, communicator, key, extents, own.get(key))
        else:
            found[key] = own.get(key, value)
    return found


def _full_value(
    original: Original, communicator: Communicator, key: str, extents: Sequence[Any], piece: Any
) -> FullValue:
    known = [extent for extent in extents if isinstance(extent, _Extent)]
    lengths = [each.stop - each.start if isinstance(each, _Extent) else 0 for each in extents]
    shape, part = original.shape, original.interval.part
    held = [each for each in known if each.start < each.stop]
    starts, stops = [each.start for each in held], [each.stop for each in held]
    held_shape = original.interval.held_shape
    if part is None and _is_by_more(original, key, known[0].shape):
        shape = held_shape = known[0].shape
    if [*starts, held_shape.numel()] != [0, *stops] or {each.shape for each in known} != {shape}:
        parts = ", ".join(f"[{each.start}, {each.stop}) of {tuple(each.shape)}" for each in known)
        raise ValueError(
            f"optimizer state '{key}' of parameter '{original.fqn}', of shape {tuple(shape)}, cannot be "
            f"put together from what the {communicator.size} ranks have of it: {parts}; save it "
            "with torch.distributed.checkpoint, which fits it to other numbers of ranks"
        )
    write = copier(piece.piece) if isinstance(piece, IntervalTensor) else torch.Tensor.zero_
    dtype = known[0].dtype
    return FullValue((original.fqn, key), held_shape, dtype, communicator, lengths, write, part)


def _is_by_more(original: Original, key: str, shape: torch.Size) -> bool:
    """Whether state of this shape has a number for several elements: for a block of them, or for a row."""
    if key.endswith(SCALE):
        return block_of(original.shape.numel(), shape[0]) is not None
    return len(original.shape) > 1 and shape[:1] == original.shape[:1]


# to save


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of its optimizer's state.

    Attributes:
        rank: The rank, as the default group counts.
        error: Why it cannot go on.
        states: What it has of each parameter of which it holds elements, by name.
    """

    rank: int
    error: Exception | None
    states: dict[str, State]


def agreed(names: Originals, pieces: Mapping[str, State], error: ValueError | None) -> dict[str, State]:
    """Returns, for every parameter with state on any rank, `FullValue`s of what is cut, and all other values.

    A rank whose slice of a parameter is empty has no state of it. Any rank's error is raised on all.

    Raises:
        RuntimeError: If a rank lacks state of what it holds, and another has it.
    """
    cut = [each for each in names.by_name.values() if each.handle is not None and not each.uncut]
    found = dict(pieces)
    for original, communicator, entries in _exchanged(cut, pieces, error):
        found[original.fqn] = _together(original, communicator, entries, pieces.get(original.fqn, {}))
    return {fqn: found[fqn] for fqn in names.by_name if found.get(fqn)}


def with_empty_pieces(
    names: Originals, pieces: Mapping[str, State], error: ValueError | None
) -> dict[str, State]:
    """Returns pieces of every parameter with state on any rank, in one order; collective.

    Pieces of which this rank holds nothing are empty. Only what some rank holds nothing of is asked for.

    Raises:
        RuntimeError: As `agreed`.
    """
    found = dict(pieces)
    partly = [each for each in names.by_name.values() if not each.on_all_ranks]
    for original, _, entries in _exchanged(partly, pieces, error):
        if original.left_out:
            told = {key: value for entry in reversed(entries) for key, value in entry.items()}
            found[original.fqn] = {key: _empty(original, key, value) for key, value in told.items()}
    return {fqn: found[fqn] for fqn in names.by_name if found.get(fqn)}


def _empty(original: Original, key: str, told: Any) -> Any:
    """Returns the piece of a rank that holds nothing, or the value that is the same for all ranks."""
    if not isinstance(told, _Extent):
        return told
    nothing = torch.empty(0, dtype=told.dtype, device=original.source.device)
    if told.shape == original.shape and not key.endswith(SCALE):
        return original.piece(nothing)
    bounds = _bounds_in(original, key, told.shape)
    return IntervalTensor(told.shape, 0 if bounds is None else bounds[0], nothing)


def _exchanged(
    originals: Iterable[Original], pieces: Mapping[str, State], error: ValueError | None
) -> Iterator[tuple[Original, Communicator, list[State]]]:
    """Yields parameters with what each rank has of their state; collective over the ranks that hold them.

    Raises:
        RuntimeError: If a rank lacks state of what it holds, and another has it.
        ValueError: If any rank has an error.
    """
    by_group: dict[Communicator, list[Original]] = {}
    for original in originals:
        if original.handle is not None:
            by_group.setdefault(original.handle.communicator, []).append(original)
    told: dict[Communicator, list[_Told]] = {}
    for communicator, members in by_group.items():
        own = {each.fqn: _told(pieces.get(each.fqn, {})) for each in members if not each.left_out}
        told[communicator] = communicator.all_gather_object(_Told(rank(), error, own))
    for each_error in (error, *(each.error for of_group in told.values() for each in of_group)):
        if each_error is not None:
            raise each_error
    for communicator, members in by_group.items():
        for original in members:
            _refuse_lacking(original.fqn, told[communicator])
            _refuse_differing(original.fqn, told[communicator])
            yield original, communicator, [each.states.get(original.fqn, {}) for each in told[communicator]]


def _refuse_lacking(fqn: str, told: Sequence[_Told]) -> None:
    """Refuses that a rank lacks what another has: zeros in its place would be wrong."""
    having = [each.rank for each in told if each.states.get(fqn)]
    lacking = [each.rank for each in told if each.states.get(fqn) == {}]
    if having and lacking:
        raise RuntimeError(
            f"rank {lacking[0]} has no optimizer state of parameter '{fqn}', of which rank {having[0]} has: "
            "every rank holds a part of it, so make all ranks' optimizers of the same parameters"
        )


_NUMBERS = (bool, int, float, torch.Tensor)


def _refuse_differing(fqn: str, told: Sequence[_Told]) -> None:
    """Refuses numbers that differ between ranks: they are of what each rank holds, not of the whole."""
    having = [each for each in told if each.states.get(fqn)]
    for key, value in having[0].states[fqn].items() if having else ():
        for each in having[1:]:
            other = each.states[fqn].get(key, value)
            if isinstance(value, _NUMBERS) and not same_values(value, other):
                raise ValueError(
                    f"optimizer state '{key}' of parameter '{fqn}' is {value!r} on rank {having[0].rank} and "
                    f"{other!r} on rank {each.rank}, and no number stands for both: the optimizer computes "
                    "with whole parameters; use an elementwise one, or NO_SHARD with use_orig_params=True"
                )


# to load


def refitted(model: nn.Module, state_dict: Any) -> Any:
    """Returns a state dict of pieces with those pieces that this rank holds of `model`; collective.

    Where all ranks' pieces are those already, the ranks only tell each other so. Otherwise what was cut in
    another way is gathered, one tensor after the other, and cut anew.

    Args:
        model: The wrapped module, or one that contains it.
        state_dict: By name, of this rank; what is no optimizer state dict is returned as it is.

    Raises:
        ValueError: If the ranks do not hold all of a tensor between them, each a part behind the one before.
    """
    handles = handles_of(units_in(model).values())
    if not handles:
        return state_dict
    communicator = max((handle.communicator for handle in handles), key=lambda each: each.size)
    names = Originals(model)
    states: Mapping[str, State] = state_dict.get("state", {}) if isinstance(state_dict, Mapping) else {}
    if all(communicator.all_gather_object(_fits(names, states))):
        return state_dict
    own = {fqn: _told(entry) for fqn, entry in states.items() if fqn in names.by_name}
    told: list[dict[str, State]] = communicator.all_gather_object(own)
    exchanged: dict[str, State] = {}
    for fqn, original in names.by_name.items():
        entries = [each.get(fqn, {}) for each in told]
        entry = _together(original, communicator, entries, states.get(fqn, {}))
        if any(isinstance(value, FullValue) for value in entry.values()):
            exchanged[fqn] = entry
    values = [
        value for entry in exchanged.values() for value in entry.values() if isinstance(value, FullValue)
    ]
    for (fqn, key), full in stream(values, max((value.nbytes for value in values), default=1)):
        exchanged[fqn][key] = _piece_of(names.by_name[fqn], key, full)
    if not isinstance(state_dict, Mapping):
        return state_dict
    return {**state_dict, "state": {**states, **exchanged}}


def _piece_of(original: Original, key: str, full: torch.Tensor) -> Any:
    if full.shape == original.shape and not key.endswith(SCALE):
        return original.piece_of(full)
    bounds = _bounds_in(original, key, full.shape)
    return full if bounds is None else IntervalTensor(full.shape, bounds[0], full.reshape(-1)[slice(*bounds)])


def _bounds_in(original: Original, key: str, shape: torch.Size) -> tuple[int, int] | None:
    """As `Original.bounds_in`, for a state of this name."""
    if not key.endswith(SCALE):
        return original.bounds_in(shape)
    block = block_of(original.shape.numel(), shape[0])
    return None if block is None else original.bounds_in(shape, block)


def _fits(names: Originals, states: Mapping[str, State]) -> bool:
    """Whether this rank's pieces are of what it holds now."""
    return all(
        (value.start, value.stop) == _bounds_in(original, key, value.shape)
        for fqn, original in names.by_name.items()
        for key, value in states.get(fqn, {}).items()
        if isinstance(value, IntervalTensor)
    )
