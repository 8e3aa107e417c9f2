"""Gathers of the ranks' changes to the first rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._state import FirstRank, Original

_ALIGNMENT_BYTES = 8
"""Start of every tensor in a message, so that it can be seen in any dtype."""

_Note = tuple[str, int, tuple[torch.dtype, torch.dtype], int]
"""Name, number of elements, dtypes of indices and values, part of the checksum."""


@dataclass(frozen=True)
class ShardChanges:
    """One shard's changed elements, by index in the flattened parameter, and its part of the checksum."""

    name: str
    index: torch.Tensor
    value: torch.Tensor
    total: int


def first_holders(model: nn.Module, originals: Iterable[Original]) -> list[Original]:
    """Returns the parameters whose local elements no earlier rank holds."""
    first = FirstRank(model)
    return [original for original in originals if _is_first(original, first)]


def _is_first(original: Original, first: FirstRank) -> bool:
    buffers, part = original.buffers, original.interval.part
    if buffers is None:
        return first.is_here
    if part is None:
        return first.is_first_with(buffers)
    return part.is_first_copy and buffers.replicas.rank == 0


def gathered_on_first_rank(model: nn.Module, own: Sequence[ShardChanges]) -> list[ShardChanges]:
    """Gathers all ranks' changes on the first rank, in rank order; returns none on others. Collective."""
    first, changes = FirstRank(model), [*own]
    for communicator in reversed(first.steps):
        changes = _gathered(communicator, changes)
    return changes if first.is_here else []


def _gathered(communicator: Communicator, own: Sequence[ShardChanges]) -> list[ShardChanges]:
    """Gathers changes on the first rank of a group; the others keep nothing."""
    data = _packed(own)
    notes = [
        (change.name, len(change.index), (change.index.dtype, change.value.dtype), change.total)
        for change in own
    ]
    by_rank = communicator.all_gather_object((len(data), notes))
    most, device = max(size for size, _ in by_rank), communicator.device
    padded = torch.cat([data, data.new_zeros(most - len(data))]).to(device)
    full = padded.new_empty(most * communicator.size) if communicator.rank == 0 else None
    if most:
        communicator.gather(padded, full)
    if full is None:
        return []
    rows = full.view(communicator.size, most).cpu()
    return [change for row, (_, notes) in zip(rows, by_rank) for change in _unpacked(row, notes)]


def _packed(changes: Iterable[ShardChanges]) -> torch.Tensor:
    parts = [torch.empty(0, dtype=torch.uint8)]
    for change in changes:
        for tensor in (change.index, change.value):
            data = tensor.contiguous().view(torch.uint8)
            parts += [data, data.new_zeros(-len(data) % _ALIGNMENT_BYTES)]
    return torch.cat(parts)


def _unpacked(row: torch.Tensor, notes: Iterable[_Note]) -> Iterator[ShardChanges]:
    begin = 0
    for name, count, dtypes, total in notes:
        tensors = []
        for dtype in dtypes:
            end = begin + count * dtype.itemsize
            # Where nothing lies may be anywhere, which a view would object to.
            tensors.append(row[begin:end].view(dtype) if count else torch.empty(0, dtype=dtype))
            begin = end + -end % _ALIGNMENT_BYTES
        index, value = tensors
        yield ShardChanges(name, index, value, total)
