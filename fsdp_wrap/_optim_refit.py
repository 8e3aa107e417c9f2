"""Pieces of optimizer state that were cut by another wrapping, exchanged for those of this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._full_values import FullValue, copier, handles_of
from fsdp_wrap._interval_tensor import IntervalTensor
from fsdp_wrap._originals import Original, Originals
from fsdp_wrap._streaming import stream
from fsdp_wrap._unit import units_in

__all__ = ["refitted"]

State = dict[str, Any]


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
    exchanged = _Exchange(names, communicator, states).states()
    if not isinstance(state_dict, Mapping):
        return state_dict
    return {**state_dict, "state": {**states, **exchanged}}


def _fits(names: Originals, states: Mapping[str, State]) -> bool:
    """Whether this rank's pieces are of what it holds now."""
    return all(
        (value.start, value.stop) == (original.interval.start, original.interval.stop)
        for fqn, original in names.by_name.items()
        for value in states.get(fqn, {}).values()
        if isinstance(value, IntervalTensor) and value.shape == original.shape
    )


@dataclass(frozen=True)
class _Extent:
    """Which elements of a full tensor a rank has."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


class _Exchange:
    """The exchange of all pieces of a state dict.

    Args:
        names: The parameters of the model that takes them.
        communicator: Of the ranks that hold them between them.
        states: What this rank has, by name.
    """

    def __init__(self, names: Originals, communicator: Communicator, states: Mapping[str, State]) -> None:
        self._names, self._communicator, self._states = names, communicator, states
        own = {fqn: _told(entry) for fqn, entry in states.items() if fqn in names.by_name}
        self._told: list[dict[str, State]] = communicator.all_gather_object(own)

    def states(self) -> dict[str, State]:
        """Returns the states of all parameters with pieces, with those of this rank."""
        values = list(self._values())
        result: dict[str, State] = {value.key[0]: self._uncut(value.key[0]) for value in values}
        for (fqn, key), full in stream(values, max((value.nbytes for value in values), default=1)):
            original = self._names.by_name[fqn]
            start, stop = original.interval.start, original.interval.stop
            piece = full.reshape(-1)[start:stop].to(original.source.device, copy=True)
            result[fqn][key] = IntervalTensor(original.shape, start, piece)
        return result

    def _values(self) -> Iterator[FullValue]:
        """Yields what is cut, on every rank in the same order."""
        for fqn, original in self._names.by_name.items():
            for key in sorted({key for told in self._told for key in told.get(fqn, {})}):
                extents = [told.get(fqn, {}).get(key) for told in self._told]
                if any(isinstance(extent, _Extent) for extent in extents):
                    yield self._value(original, key, extents)

    def _value(self, original: Original, key: str, extents: Sequence[Any]) -> FullValue:
        known = [extent for extent in extents if isinstance(extent, _Extent)]
        lengths = [each.stop - each.start if isinstance(each, _Extent) else 0 for each in extents]
        starts = accumulate(lengths, initial=0)
        consecutive = all(
            each.start == start
            for each, start in zip(extents, starts)
            if isinstance(each, _Extent) and each.start < each.stop
        )
        shape = original.shape
        if not consecutive or sum(lengths) != shape.numel() or {each.shape for each in known} != {shape}:
            parts = ", ".join(f"[{each.start}, {each.stop}) of {tuple(each.shape)}" for each in known)
            raise ValueError(
                f"optimizer state '{key}' of parameter '{original.fqn}', of shape {tuple(shape)}, cannot be "
                f"put together from what the {self._communicator.size} ranks have of it: {parts}; save it "
                "with torch.distributed.checkpoint, which fits it to other numbers of ranks"
            )
        piece = self._states.get(original.fqn, {}).get(key)
        write = copier(piece.piece) if isinstance(piece, IntervalTensor) else torch.Tensor.zero_
        return FullValue((original.fqn, key), shape, known[0].dtype, self._communicator, lengths, write)

    def _uncut(self, fqn: str) -> State:
        """Returns what ranks have of a parameter beside pieces, such as a step count."""
        entry = next(told[fqn] for told in self._told if fqn in told)
        return {key: value for key, value in entry.items() if not isinstance(value, _Extent)}


def _told(entry: Mapping[str, Any]) -> State:
    """Describes pieces; what is whole and no mere count each rank has itself, and is not sent."""
    told: State = {}
    for key, value in entry.items():
        if isinstance(value, IntervalTensor):
            told[key] = _Extent(value.shape, value.dtype, value.start, value.stop)
        elif not isinstance(value, torch.Tensor) or value.dim() == 0:
            told[key] = value
    return told
