"""`weight_changes`: the elements of a model that changed since the last time, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from fsdp_wrap._core import is_castable
from fsdp_wrap._state import Original, Originals, check_dtype, settled_units
from fsdp_wrap.weights._gather import Found, first_holders, gathered_on_first_rank

_DOING = "weight_changes()"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes, as which numbers are compared: a NaN equals itself, and 0 is not -0."""

_CHUNK = 2**20
"""Elements that are looked at together, so that little memory is taken beside shard and snapshot."""

_MIX, _SPREAD = 0x2545F4914F6CDD1D, 0x27D4EB2F165667C5  # odd, so that products lose nothing


class Change(NamedTuple):
    """Elements of one parameter that changed.

    Attributes:
        name: The parameter's, in the unwrapped module.
        index: Of the elements in the flattened parameter: int64, 1-D.
        value: What they are now: 1-D, as long as `index`.
    """

    name: str
    index: torch.Tensor  # type: ignore[assignment]
    value: torch.Tensor


@dataclass(frozen=True)
class Changes:
    """What one `collect` has found.

    Attributes:
        of: The changes, one for each parameter with any, in the model's order.
        checksums: Of each parameter as it is now, with all its elements, by name.
    """

    of: list[Change] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.of)

    def __len__(self) -> int:
        return len(self.of)

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        return sum(change.index.nbytes + change.value.nbytes for change in self.of)


def weight_changes(model: nn.Module, dtype: torch.dtype | None = None) -> WeightChanges:
    """Begins to follow which elements of a model's parameters change.

    Each rank keeps a copy of its own shards in host memory, in `dtype`. Nothing is unsharded. Every rank
    makes it, when the receiver has the weights as they are then (by `weight_source`, say).

    Args:
        model: Wrapped by `FullyShardedDataParallel` or `fully_shard`, in whole or in part.
        dtype: That in which the receiver has floating-point parameters; None for the master dtype. What does
            not change the bits of it is no change.

    Raises:
        RuntimeError: Inside a forward, a backward or `summon_full_params`; if a parameter is on the meta
            device.
        TypeError: If `dtype` is no dtype.
        ValueError: If it is not floating-point, or a parameter is of a tensor subclass.
    """
    check_dtype(dtype)
    return WeightChanges(model, dtype)


class WeightChanges:
    """The changes of a model's parameters since the last `collect`, or since `weight_changes`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._model, self._dtype = model, dtype
        originals = self._originals()
        self._extents = _extents(originals)
        self._snapshots = {each.fqn: self._copied(each) for each in first_holders(model, originals)}

    def _copied(self, original: Original) -> torch.Tensor:
        held = original.interval.data
        return held.to("cpu", self._dtype_of(original), copy=True)

    def collect(self, checksums: bool = True) -> Changes:
        """Finds what changed; collective.

        Args:
            checksums: Also compute those, which takes one more pass over the shards.

        Returns:
            All changes, in host memory, on the first rank; nothing on the others.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`.
            ValueError: If a parameter is there that was not, or this rank holds other elements of it.
        """
        originals = self._originals()
        for name, extent in _extents(originals).items():
            if self._extents.get(name) != extent:
                raise ValueError(
                    f"'{name}' is not what it was when weight_changes() was called: call it again"
                )
        own = [self._found(each, checksums) for each in first_holders(self._model, originals)]
        return _joined(gathered_on_first_rank(self._model, own), checksums)

    def _originals(self) -> list[Original]:
        settled_units(self._model, _DOING)
        originals = [*Originals(self._model).by_name.values()]
        for each in originals:
            _refuse(each)
        return originals

    def _dtype_of(self, original: Original) -> torch.dtype:
        dtype = original.interval.data.dtype
        return self._dtype if self._dtype is not None and is_castable(dtype) else dtype

    def _found(self, original: Original, checksums: bool) -> Found:
        """Compares one shard with its snapshot, which it updates."""
        held, snapshot = original.interval.data, self._snapshots[original.fqn]
        indices, total = [], 0
        for begin in range(0, len(held), _CHUNK):
            now = held[begin : begin + _CHUNK].detach().to("cpu", snapshot.dtype)
            before = snapshot[begin : begin + _CHUNK]
            changed = (_bits(now) != _bits(before)).nonzero().view(-1)
            indices.append(changed + begin)
            before.copy_(now)
            if checksums:
                places = torch.arange(begin, begin + len(now))
                total += _sum_of(_bits(now), _whole_index(original, places))
        local = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64)
        return Found(original.fqn, _whole_index(original, local), snapshot[local], _wrapped(total))


def _extents(originals: Iterable[Original]) -> dict[str, tuple[torch.Size, int, int]]:
    """Returns, by name, the shape of each parameter and which of its elements this rank holds."""
    return {each.fqn: (each.shape, each.interval.start, each.interval.stop) for each in originals}


def _refuse(original: Original) -> None:
    if original.source.is_meta:
        raise RuntimeError(f"'{original.fqn}' is on the meta device and has no values")
    if original.wanted is not None:
        raise ValueError(f"'{original.fqn}' is of a tensor subclass, whose elements {_DOING} cannot tell")
    if original.interval.data.is_meta:
        raise ValueError(
            f"'{original.fqn}' is a DTensor outside of all units, of which {_DOING} knows no shard: wrap it"
        )
    if original.interval.data.dtype.itemsize not in _BITS:
        raise ValueError(
            f"'{original.fqn}' is of {original.interval.data.dtype}, which {_DOING} does not take"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _whole_index(original: Original, local: torch.Tensor) -> torch.Tensor:
    """Returns the indices in the flattened parameter of elements of this rank's shard."""
    interval, part = original.interval, original.interval.part
    if part is None:
        return local + interval.start
    return part.index_in_whole(local + interval.start)


def _sum_of(bits: torch.Tensor, index: torch.Tensor) -> int:
    """Returns the part of a checksum that some elements make; the order does not matter."""
    mixed = (bits.to(torch.int64) ^ (index * _SPREAD)) * _MIX
    return int(((mixed ^ (mixed >> 29)) * _SPREAD).sum())


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def _joined(found: Iterable[Found], checksums: bool) -> Changes:
    """Returns the changes that all ranks have found, by parameter."""
    pieces: dict[str, list[Found]] = {}
    for each in found:
        pieces.setdefault(each.name, []).append(each)
    changes, sums = [], {}
    for name, several in pieces.items():
        index = torch.cat([each.index for each in several])
        if len(index):
            changes.append(Change(name, index, torch.cat([each.value for each in several])))
        if checksums:
            sums[name] = _wrapped(sum(each.total for each in several))
    return Changes(changes, sums)


def checksum(tensor: torch.Tensor) -> int:
    """Returns the checksum of a full tensor, as `Changes.checksums` has it, of its bits."""
    flat = tensor.detach().reshape(-1)
    total = 0
    for begin in range(0, len(flat), _CHUNK):
        some = flat[begin : begin + _CHUNK].cpu()
        total += _sum_of(_bits(some), torch.arange(begin, begin + len(some)))
    return _wrapped(total)


def apply_changes(state_dict: Mapping[str, torch.Tensor], changes: Changes) -> None:
    """Writes changes into full tensors, in place. Where there are checksums, proves what comes of it first.

    Args:
        state_dict: Plain tensors by the names of the unwrapped module, in the dtype of `weight_changes`.
        changes: What `collect` returned on the first rank.

    Raises:
        ValueError: If a name is missing, or a tensor has another dtype or fewer elements.
        RuntimeError: If the checksum of a parameter would be another: the tensors were not what the changes
            began from. Nothing is written in either case.
    """
    for change in changes:
        _check(change, state_dict.get(change.name))
    by_name = {change.name: change for change in changes}
    for name, expected in changes.checksums.items():
        if name in state_dict and _after(state_dict[name], by_name.get(name)) != expected:
            raise RuntimeError(
                f"'{name}' with its changes would not be what the trainer has: earlier changes are missing, "
                "or it was written to. Send all of it (weight_source), and go on from there"
            )
    for change in changes:
        target = state_dict[change.name].detach()
        flat = target.reshape(-1)
        flat[change.index.to(flat.device)] = change.value.to(flat.device)
        if flat.data_ptr() != target.data_ptr():
            target.copy_(flat.view(target.shape))


def _check(change: Change, target: torch.Tensor | None) -> None:
    if target is None:
        raise ValueError(f"there is no '{change.name}' among the tensors, and it changed")
    if target.dtype != change.value.dtype:
        raise ValueError(
            f"'{change.name}' is of {target.dtype}, and its changes of {change.value.dtype}: call "
            "weight_changes(model, dtype=...) with the dtype of the tensors"
        )
    if len(change.index) and int(change.index.max()) >= target.numel():
        raise ValueError(f"'{change.name}' has {target.numel()} elements, and a later one changed")


def _after(tensor: torch.Tensor, change: Change | None) -> int:
    """Returns the checksum that a tensor will have with a change."""
    total = checksum(tensor)
    if change is not None:
        old = tensor.detach().reshape(-1)[change.index.to(tensor.device)].cpu()
        total += _sum_of(_bits(change.value), change.index) - _sum_of(_bits(old), change.index)
    return _wrapped(total)
