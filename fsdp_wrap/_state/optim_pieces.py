"""Optimizer state on all ranks: metadata of all pieces exchanged, pieces gathered or cut anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Communicator, calling
from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._runtime import buffers_of, units_in
from fsdp_wrap._state.full_values import FullValue, copier, stream
from fsdp_wrap._state.optim_params import rank, same_values
from fsdp_wrap._state.originals import Original, Originals
from fsdp_wrap._state.small_states import SCALE, block_of, bounds_in

State = dict[str, Any]


@dataclass(frozen=True)
class _PieceMetadata:
    """A rank's interval of a full tensor."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


def _metadata(states: Mapping[str, State]) -> dict[str, State]:
    """Returns metadata of pieces, and numbers; leaves out whole tensors, which every rank has.

    Counts that are the same are one tensor, which is sent once.
    """
    described, counts = {fqn: State() for fqn in states}, dict[Any, torch.Tensor]()
    for fqn, key, value in ((fqn, *item) for fqn, entry in states.items() for item in entry.items()):
        if isinstance(value, IntervalTensor):
            described[fqn][key] = _PieceMetadata(value.shape, value.dtype, value.start, value.stop)
        elif not isinstance(value, torch.Tensor):
            described[fqn][key] = value
        elif value.dim() == 0:
            described[fqn][key] = counts.setdefault((value.dtype, value.device, str(value.item())), value)
    return described


def _together(
    original: Original,
    communicator: Communicator,
    entries: Sequence[Mapping[str, Any]],
    own: Mapping[str, Any],
) -> State:
    """Returns one parameter's state: a `FullValue` for pieces, and other values as they are.

    Args:
        original: The parameter.
        communicator: Its ranks hold the parameter between them.
        entries: Each rank's metadata of its state.
        own: This rank's pieces and values.
    """
    state: State = {}
    for key, value in {key: value for entry in reversed(entries) for key, value in entry.items()}.items():
        extents = [entry.get(key) for entry in entries]
        if any(isinstance(extent, _PieceMetadata) for extent in extents):
            state[key] = _full_value(original, communicator, key, extents, own.get(key))
        else:
            state[key] = own.get(key, value)
    return state


def _full_value(
    original: Original, communicator: Communicator, key: str, extents: Sequence[Any], piece: Any
) -> FullValue:
    known = [extent for extent in extents if isinstance(extent, _PieceMetadata)]
    lengths = [extent.stop - extent.start if isinstance(extent, _PieceMetadata) else 0 for extent in extents]
    shape, part = original.shape, original.interval.part
    held = [extent for extent in known if extent.start < extent.stop]
    starts, stops = [extent.start for extent in held], [extent.stop for extent in held]
    held_shape = original.interval.held_shape
    if part is None and _is_by_more(original, key, known[0].shape):
        shape = held_shape = known[0].shape
    if [*starts, held_shape.numel()] != [0, *stops] or {extent.shape for extent in known} != {shape}:
        parts = ", ".join(f"[{extent.start}, {extent.stop}) of {tuple(extent.shape)}" for extent in known)
        raise ValueError(
            f"optimizer state '{key}' of parameter '{original.fqn}', of shape {tuple(shape)}, cannot be "
            f"put together from what the {communicator.size} ranks have of it: {parts}; save it "
            "with torch.distributed.checkpoint, which fits it to other numbers of ranks"
        )
    write = copier(piece.piece) if isinstance(piece, IntervalTensor) else torch.Tensor.zero_
    dtype = known[0].dtype
    return FullValue((original.fqn, key), held_shape, dtype, communicator, lengths, write, part)


def _is_by_more(original: Original, key: str, shape: torch.Size) -> bool:
    """Whether state of this shape has one element per block, or one entry per row."""
    if key.endswith(SCALE):
        return block_of(original.shape.numel(), shape[0]) is not None
    return len(original.shape) > 1 and shape[:1] == original.shape[:1]


# to save


@dataclass(frozen=True)
class _RankState:
    """One rank's part of an optimizer's state, as metadata by parameter name, or its error."""

    rank: int
    error: Exception | None
    states: dict[str, State]


def agreed(names: Originals, pieces: Mapping[str, State], error: ValueError | None) -> dict[str, State]:
    """Returns `FullValue`s of pieces and all other values of every parameter with state on any rank.

    Collective. A rank whose slice of a parameter is empty has no state of it. Any rank's error is raised on
    all.
    """
    cut = [original for original in names.by_name.values() if original.owned and not original.uncut]
    states = dict(pieces)
    for original, communicator, entries in _exchanged(cut, pieces, error):
        states[original.fqn] = _together(original, communicator, entries, pieces.get(original.fqn, {}))
    return {fqn: states[fqn] for fqn in names.by_name if states.get(fqn)}


def with_empty_pieces(
    names: Originals, pieces: Mapping[str, State], error: ValueError | None
) -> dict[str, State]:
    """Returns pieces of every parameter with state on any rank, in one order; collective.

    A rank without elements of a parameter gets empty pieces. Only of such parameters metadata are exchanged.
    """
    states = dict(pieces)
    partly = [original for original in names.by_name.values() if not original.on_all_ranks]
    for original, _, entries in _exchanged(partly, pieces, error):
        if original.left_out:
            merged = {key: value for entry in reversed(entries) for key, value in entry.items()}
            states[original.fqn] = {key: _empty(original, key, value) for key, value in merged.items()}
    return {fqn: states[fqn] for fqn in names.by_name if states.get(fqn)}


def _empty(original: Original, key: str, other: Any) -> Any:
    """Returns the piece of a rank without elements, or the number that all ranks share."""
    if not isinstance(other, _PieceMetadata):
        return other
    nothing = torch.empty(0, dtype=other.dtype, device=original.source.device)
    if other.shape == original.shape and not key.endswith(SCALE):
        return original.piece(nothing)
    bounds = bounds_in(original, other.shape, key.endswith(SCALE))
    return IntervalTensor(other.shape, 0 if bounds is None else bounds[0], nothing)


def _exchanged(
    originals: Iterable[Original], pieces: Mapping[str, State], error: ValueError | None
) -> Iterator[tuple[Original, Communicator, list[State]]]:
    """Yields parameters with each rank's metadata of their state; collective over their ranks."""
    by_group: dict[Communicator, list[Original]] = {}
    for original in originals:
        if original.buffers is not None:
            by_group.setdefault(original.buffers.communicator, []).append(original)
    ranks: dict[Communicator, list[_RankState]] = {}
    with calling("optim_state_dict()", [communicator.positions for communicator in by_group]):
        for communicator, members in by_group.items():
            own = _metadata(
                {original.fqn: pieces.get(original.fqn, {}) for original in members if not original.left_out}
            )
            ranks[communicator] = communicator.all_gather_object(_RankState(rank(), error, own))
    for failure in (error, *(rank_state.error for of_group in ranks.values() for rank_state in of_group)):
        if failure is not None:
            raise failure
    for communicator, members in by_group.items():
        for original in members:
            _refuse_lacking(original.fqn, ranks[communicator])
            _refuse_differing(original.fqn, ranks[communicator])
            yield (
                original,
                communicator,
                [rank_state.states.get(original.fqn, {}) for rank_state in ranks[communicator]],
            )


def _refuse_lacking(fqn: str, ranks: Sequence[_RankState]) -> None:
    """Raises if a rank lacks state that another has: zeros in its place would be wrong."""
    having = [rank_state.rank for rank_state in ranks if rank_state.states.get(fqn)]
    lacking = [rank_state.rank for rank_state in ranks if rank_state.states.get(fqn) == {}]
    if having and lacking:
        raise RuntimeError(
            f"rank {lacking[0]} has no optimizer state of parameter '{fqn}', of which rank {having[0]} has: "
            "every rank holds a part of it, so make all ranks' optimizers of the same parameters"
        )


_NUMBERS = (bool, int, float, torch.Tensor)


def _refuse_differing(fqn: str, ranks: Sequence[_RankState]) -> None:
    """Raises if numbers differ between ranks: each then describes a part, and none the parameter."""
    having = [rank_state for rank_state in ranks if rank_state.states.get(fqn)]
    for key, value in having[0].states[fqn].items() if having else ():
        for rank_state in having[1:]:
            other = rank_state.states[fqn].get(key, value)
            if isinstance(value, _NUMBERS) and not same_values(value, other):
                raise ValueError(
                    f"optimizer state '{key}' of parameter '{fqn}' is {value!r} on rank {having[0].rank} and "
                    f"{other!r} on rank {rank_state.rank}, and no number stands for both: the optimizer "
                    "computes with whole parameters; use an elementwise one, or NO_SHARD with "
                    "use_orig_params=True"
                )


# to load


def refitted(model: nn.Module, state_dict: Any) -> Any:
    """Returns a state dict of pieces with the pieces that this rank holds of `model`; collective.

    Where all ranks' pieces fit already, the ranks only agree on that. Otherwise pieces of another sharding
    are gathered, one tensor after the other, and cut anew.

    Args:
        model: The wrapped module, or one that contains it.
        state_dict: By name, of this rank; anything else is returned as it is.
    """
    all_buffers = buffers_of(units_in(model).values())
    if not all_buffers:
        return state_dict
    communicator = max((buffers.communicator for buffers in all_buffers), key=lambda group: group.size)
    names = Originals(model)
    states: Mapping[str, State] = state_dict.get("state", {}) if isinstance(state_dict, Mapping) else {}
    if all(communicator.all_gather_object(_fits(names, states))):
        return state_dict
    own = _metadata({fqn: entry for fqn, entry in states.items() if fqn in names.by_name})
    every: list[dict[str, State]] = communicator.all_gather_object(own)
    exchanged: dict[str, State] = {}
    for fqn, original in names.by_name.items():
        entries = [of_rank.get(fqn, {}) for of_rank in every]
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
    bounds = bounds_in(original, full.shape, key.endswith(SCALE))
    return full if bounds is None else IntervalTensor(full.shape, bounds[0], full.reshape(-1)[slice(*bounds)])


def _fits(names: Originals, states: Mapping[str, State]) -> bool:
    """Whether this rank's pieces are those that it holds now."""
    return all(
        (value.start, value.stop) == bounds_in(original, value.shape, key.endswith(SCALE))
        for fqn, original in names.by_name.items()
        for key, value in states.get(fqn, {}).items()
        if isinstance(value, IntervalTensor)
    )
