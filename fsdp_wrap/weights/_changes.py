"""`weight_changes`: the elements of a model that changed since the last time, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from fsdp_wrap._core import is_castable
from fsdp_wrap._params import to_local
from fsdp_wrap._state import Original, Originals, check_dtype, persistent_buffers, settled_units, uncut
from fsdp_wrap.weights._gather import ShardChanges, first_holders, gathered_on_first_rank

_DOING = "weight_changes()"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes, as which numbers are compared: a NaN equals itself, and 0 is not -0."""

_AT_ONCE, _MIXED = 2**20, 2**16
"""Elements that come to the host, and that are mixed into a checksum, together: little memory is taken beside
them, an accelerator sends few large pieces, and what is mixed stays in the cache."""

_MIX, _SPREAD = 0x2545F4914F6CDD1D, 0x27D4EB2F165667C5  # odd, so that products lose nothing


class Change(NamedTuple):
    """Elements of one parameter that changed.

    Attributes:
        name: The parameter's, in the unwrapped module.
        index: Indices of the elements in the flattened parameter: int64, 1-D.
        value: Their values now: 1-D, as long as `index`.
    """

    name: str
    index: torch.Tensor  # type: ignore[assignment]
    value: torch.Tensor


@dataclass(frozen=True)
class Changes:
    """The result of one `collect`.
    Attributes:
        of: The changes, one for each parameter with any, in the model's order.
        checksums: Checksum of each parameter as it is now, with all its elements, by name.
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


def weight_changes(
    model: nn.Module, dtype: torch.dtype | None = None, *, buffers: bool = True
) -> WeightChanges:
    """Begins to follow which elements of a model's parameters and buffers change.

    Each rank keeps a copy of its own shards in host memory, in `dtype`. Nothing is unsharded. Every rank
    makes it, when the receiver has the weights as they are then (by `weight_source`, say).

    Args:
        model: Wrapped by `FullyShardedDataParallel` or `fully_shard`, in whole or in part.
        dtype: The receiver's dtype of floating-point parameters; None for the master dtype. An element whose
            bits in it stay the same has not changed.
        buffers: Also the persistent buffers: those of the first rank where they differ.

    Raises:
        RuntimeError: Inside a forward, a backward or `summon_full_params`; if a parameter is on the meta
            device.
        TypeError: If `dtype` is no dtype.
        ValueError: If it is not floating-point, or a parameter is of a tensor subclass.
    """
    check_dtype(dtype)
    return WeightChanges(model, dtype, buffers)


class _Snapshot:
    """The receiver's values of one shard."""

    def __init__(self, original: Original, dtype: torch.dtype) -> None:
        self._values = original.interval.data.to("cpu", dtype, copy=True)
        self._total: int | None = None  # its part of the checksum, once that was wanted

    def follow(self, original: Original, checksums: bool) -> ShardChanges:
        """Returns the shard's elements that differ from this snapshot, and updates it."""
        held = original.interval.data.detach()
        local = self._differing(held)
        index, new = _whole_index(original, local), held[local.to(held.device)].to("cpu", self._values.dtype)
        if self._total is not None and 2 * len(local) < len(held):
            self._total += _sum_of(new, index) - _sum_of(self._values[local], index)
        elif len(local):
            self._total = None  # to look at all elements once is less work
        self._values[local] = new
        if checksums and self._total is None:
            self._total = _sum_of_all(self._values, partial(_whole_index, original))
        narrow = index.to(_index_dtype(original.shape.numel()))
        return ShardChanges(original.fqn, narrow, new, _wrapped(self._total or 0))

    def _differing(self, held: torch.Tensor) -> torch.Tensor:
        """Returns the indices (int64) in the shard of elements whose bits differ."""
        differs = torch.empty(len(held), dtype=torch.bool)
        pieces = (torch.split(tensor, _AT_ONCE) for tensor in (held, self._values, differs))
        for now, before, flags in zip(*pieces):
            torch.ne(_bits(now.to("cpu", before.dtype)), _bits(before), out=flags)
        return differs.nonzero().view(-1)


class WeightChanges:
    """The changes of a model's tensors since the last `collect`, or since `weight_changes`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, buffers: bool) -> None:
        self._model, self._dtype, self._buffers = model, dtype, buffers
        originals = self._originals()
        self._extents = _extents(originals)
        self._snapshots = {
            original.fqn: _Snapshot(original, self._dtype_of(original))
            for original in first_holders(model, originals)
        }

    def collect(self, checksums: bool = True) -> Changes:
        """Finds what changed; collective.

        Args:
            checksums: Also compute checksums. They take one more pass over the shards at first, and where
                half of a shard has changed; else only the changed elements are looked at.

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
        holders = first_holders(self._model, originals)
        own = [self._snapshots[original.fqn].follow(original, checksums) for original in holders]
        return _joined(gathered_on_first_rank(self._model, own), checksums)

    def _originals(self) -> list[Original]:
        units = settled_units(self._model, _DOING)
        originals = [*Originals(self._model).by_name.values()]
        if self._buffers:
            buffers = persistent_buffers(self._model, units)
            originals += [uncut(name, _unless_cut(buffer)) for name, buffer in buffers]
        for original in originals:
            _refuse(original)
        return originals

    def _dtype_of(self, original: Original) -> torch.dtype:
        dtype = original.interval.data.dtype
        return self._dtype if self._dtype is not None and is_castable(dtype) else dtype


def _extents(originals: Iterable[Original]) -> dict[str, tuple[torch.Size, int, int]]:
    """Returns, by name, the shape of each parameter and which of its elements this rank holds."""
    return {
        original.fqn: (original.shape, original.interval.start, original.interval.stop)
        for original in originals
    }


def _unless_cut(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a replicated `DTensor`, else the tensor itself."""
    held = to_local(buffer)
    return held if held.shape == buffer.shape else buffer


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


def _sum_of(values: torch.Tensor, index: torch.Tensor) -> int:
    """Returns some elements' share of a checksum; their order does not matter."""
    pieces = (torch.split(tensor, _MIXED) for tensor in (_bits(values), index))
    return sum(_sum_of_few(*piece) for piece in zip(*pieces))


def _sum_of_all(values: torch.Tensor, index_of: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Returns the sum of all elements; `index_of` maps places in the tensor to indices."""
    pieces = torch.split(values, _AT_ONCE)
    begins = range(0, len(values), _AT_ONCE)
    places = (torch.arange(begin, begin + len(piece)) for begin, piece in zip(begins, pieces))
    return sum(_sum_of(piece.cpu(), index_of(place)) for piece, place in zip(pieces, places))


def _sum_of_few(bits: torch.Tensor, index: torch.Tensor) -> int:
    mixed = (bits.to(torch.int64) ^ (index * _SPREAD)) * _MIX
    return int(((mixed ^ (mixed >> 29)) * _SPREAD).sum())


def _index_dtype(numel: int) -> torch.dtype:
    """Returns the smallest dtype of indices of so many elements, in which they travel."""
    return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64


def _wrapped(total: int) -> int:
    return (total + 2**63) % 2**64 - 2**63


def _joined(shard_changes: Iterable[ShardChanges], checksums: bool) -> Changes:
    """Returns all ranks' changes by parameter."""
    pieces: dict[str, list[ShardChanges]] = {}
    for change in shard_changes:
        pieces.setdefault(change.name, []).append(change)
    changes, sums = [], {}
    for name, several in pieces.items():
        index = torch.cat([part.index for part in several]).to(torch.int64)
        if len(index):
            changes.append(Change(name, index, torch.cat([part.value for part in several])))
        if checksums:
            sums[name] = _wrapped(sum(part.total for part in several))
    return Changes(changes, sums)


def checksum(tensor: torch.Tensor) -> int:
    """Returns the checksum of a full tensor, as `Changes.checksums` has it, of its bits.

    Args:
        tensor: A tensor of any shape and dtype.
    """
    return _wrapped(_sum_of_all(tensor.detach().reshape(-1), lambda places: places))


def apply_changes(state_dict: Mapping[str, torch.Tensor], changes: Changes) -> None:
    """Writes changes into full tensors, in place. Where there are checksums, proves what comes of it first.

    Args:
        state_dict: Plain tensors by the names of the unwrapped module, in the dtype of `weight_changes`.
        changes: The result of `collect` on the first rank.

    Raises:
        ValueError: If a name is missing or comes twice, a tensor has another dtype, or indices are no
            integers, repeated, or not within a tensor, or not as many as values.
        RuntimeError: If the checksum of a parameter would be another: the tensors were not what the changes
            began from. Nothing is written in either case.
    """
    by_name: dict[str, Change] = {}
    for change in changes:
        _check(change, state_dict.get(change.name))
        if change.name in by_name:
            raise ValueError(f"'{change.name}' comes twice in the changes: pass what one collect() returned")
        by_name[change.name] = change
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
    index, fault = change.index, None
    if index.dtype != torch.int64 or index.dim() != 1 or change.value.shape != index.shape:
        fault = f"{tuple(index.shape)} {index.dtype} indices and {tuple(change.value.shape)} values"
    elif len(index) and not 0 <= int(index.min()) <= int(index.max()) < target.numel():
        fault = f"indices from {int(index.min())} to {int(index.max())}"
    elif not bool((index[1:] > index[:-1]).all()) and len(torch.unique(index)) < len(index):
        fault = "the same index twice"
    if fault is not None:
        raise ValueError(
            f"the changes of '{change.name}', which has {target.numel()} elements, have {fault}: each value "
            "needs an int64 index of its own, within the tensor"
        )


def _after(tensor: torch.Tensor, change: Change | None) -> int:
    """Returns the checksum that a tensor will have with a change."""
    total = checksum(tensor)
    if change is not None:
        old = tensor.detach().reshape(-1)[change.index.to(tensor.device)].cpu()
        total += _sum_of(change.value, change.index) - _sum_of(old, change.index)
    return _wrapped(total)
