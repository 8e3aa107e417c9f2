"""Full tensors from what the ranks hold, and from the first rank to all.

`stream` gathers them one after the other, the next ones on their way while one is in use, within a budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import Communicator, Pending, deaths_told, make_communicator
from fsdp_wrap._core.torch_private import ShardedTensor, pytree
from fsdp_wrap._params import IntervalTensor, ParamHandle, assemble
from fsdp_wrap._runtime import Unit

__all__ = [
    "Announced",
    "FirstRank",
    "FullValue",
    "check_budget",
    "copier",
    "full_values",
    "handles_of",
    "is_first_rank",
    "is_sharded",
    "offloaded",
    "stream",
    "unsharded",
    "used_by",
    "value_held_here",
]


_SMALL, _BATCH = 2**16, 2**20
"""Most bytes of a tensor that travels with others, as a message costs more than a copy; and of them all."""


def handles_of(units: Iterable[Unit]) -> list[ParamHandle]:
    """Returns the handles of the units that have one."""
    return [unit.handle for unit in units if unit.handle is not None]


def used_by(units: Iterable[Unit]) -> list[Unit]:
    """Returns units, before each those from which it borrows."""
    return list(dict.fromkeys(each for unit in units for each in (*unit.lenders, unit)))


@dataclass(frozen=True)
class FullValue:
    """A full tensor that ranks hold between them, in consecutive parts, and that can be gathered.

    Attributes:
        key: What it is: a name, say.
        shape: Of the full tensor.
        dtype: In which it is gathered.
        communicator: Of the ranks.
        lengths: How many elements each rank holds.
        write: Writes this rank's elements into a 1-D tensor.
    """

    key: Any
    shape: torch.Size
    dtype: torch.dtype
    communicator: Communicator
    lengths: Sequence[int]
    write: Callable[[torch.Tensor], object]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def travels_with(self, other: FullValue) -> bool:
        """Whether the two can be parts of one message from each rank."""
        same_ranks = self.communicator == other.communicator and self.communicator.size > 1
        return same_ranks and self.dtype == other.dtype


def full_values(handle: ParamHandle) -> list[FullValue]:
    """Returns a handle's parameters, by layout and index; in master dtype."""
    return [
        FullValue((layout, index), each.shape, layout.dtype, handle.communicator, lengths, copier(each.data))
        for layout in handle.layouts
        for index, (each, lengths) in enumerate(zip(layout.intervals(), layout.held_by_rank()))
    ]


def value_held_here(key: str, tensor: torch.Tensor) -> FullValue:
    """Returns a tensor that this rank has whole.

    Raises:
        RuntimeError: If it is on the meta device.
    """
    if tensor.is_meta:
        raise RuntimeError(f"'{key}' is on the meta device and has no values")
    alone = make_communicator(None, tensor.device)
    return FullValue(key, tensor.shape, tensor.dtype, alone, [tensor.numel()], copier(tensor))


def copier(source: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Returns what copies a tensor into one of as many elements."""
    return lambda out: out.view(source.shape).copy_(source.detach(), non_blocking=True)


def offloaded(tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
    """Returns a copy in memory of its own, on the host or where the tensor is."""
    return tensor.to("cpu", copy=True) if to_host else tensor.clone()


# one after the other

_Issued = tuple[list[FullValue], list[Callable[[], torch.Tensor]], Pending]
"""A batch on its way, what makes each of its full tensors, and what to wait for before."""


def check_budget(budget: int | None) -> None:
    """Refuses what is no number of bytes.

    Raises:
        TypeError: If it is neither an int nor None.
        ValueError: If it is not positive.
    """
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget must be a number of bytes or None, not {budget!r}")
    if budget <= 0:
        raise ValueError(f"budget must be a positive number of bytes, not {budget}")


def stream(
    values: Iterable[FullValue], budget: int, *, wanted: bool = True, to_host: bool = False
) -> Generator[tuple[Any, torch.Tensor]]:
    """Gathers tensors in order; collective.

    As many as fit into the budget are on their way; one is in any case. A caller that closes the iterator
    early takes part in the remaining gathers nevertheless: the other ranks cannot know, and wait for it.
    Small tensors travel together.

    Args:
        values: The same ones on every rank.
        budget: The most bytes of what is on its way, of the tensor that is yielded, and of the one before,
            which a loop's variable still holds while the next tensor is fetched.
        wanted: Whether this rank keeps them; otherwise it yields tensors on the meta device.
        to_host: Yield them in host memory.

    Yields:
        (key, full tensor in memory of its own).
    """
    waiting, issued, held = deque(_batches(values, budget)), deque[_Issued](), 0
    try:
        while _issue(waiting, issued, budget - held):
            batch, makers = _arrived(issued.popleft())
            for value in batch:
                held = value.nbytes if wanted else 0
                full = _made(value, makers.pop(0), wanted, to_host)
                yield value.key, full
                del full
    except GeneratorExit:
        while _issue(waiting, issued, budget):
            _arrived(issued.popleft())
        raise


def _issue(waiting: deque[list[FullValue]], issued: deque[_Issued], room: int) -> bool:
    """Issues what fits, and one gather in any case; returns whether any is on its way."""
    room -= sum(_nbytes(batch) for batch, _, _ in issued)
    while waiting and (not issued or _nbytes(waiting[0]) <= room):
        batch = waiting.popleft()
        room -= _nbytes(batch)
        issued.append((batch, *_gather(batch)))
    return bool(issued)


def _arrived(issued: _Issued) -> tuple[list[FullValue], list[Callable[[], torch.Tensor]]]:
    batch, makers, pending = issued  # which may hold what arrives: it is not to outlive this call
    pending.wait()
    return batch, makers


def _made(value: FullValue, make: Callable[[], torch.Tensor], wanted: bool, to_host: bool) -> torch.Tensor:
    if not wanted:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return make().cpu() if to_host else make()


def _batches(values: Iterable[FullValue], budget: int) -> Iterator[list[FullValue]]:
    """Puts small values together that travel in one message from each rank.

    The same ones on every rank, whatever it keeps. Beside what arrived, two tensors made of it may be alive,
    or one and that before the batch: twice a batch's size must fit into the budget beside the latter.
    """
    batch: list[FullValue] = []
    room = budget // 2
    for value in values:
        nbytes = sum(each.nbytes for each in (*batch, value))
        small = value.nbytes <= _SMALL and nbytes <= min(_BATCH, room)
        if batch and not (small and batch[0].nbytes <= _SMALL and value.travels_with(batch[0])):
            yield batch
            room = (budget - batch[-1].nbytes) // 2
            batch = []
        batch.append(value)
    if batch:
        yield batch


def _nbytes(batch: list[FullValue]) -> int:
    """Returns the bytes that a batch takes, with what is made of it."""
    nbytes = sum(value.nbytes for value in batch)
    return nbytes if len(batch) == 1 else 2 * nbytes


def _gather(values: Sequence[FullValue]) -> tuple[list[Callable[[], torch.Tensor]], Pending]:
    """Issues one gather of values that travel together, or of one alone.

    Returns:
        For each value what makes, after the wait, the full tensor in memory of its own, once; and what to
        wait for. One alone arrives in its place; several arrive side by side and are copied from there.
    """
    communicator, dtype = values[0].communicator, values[0].dtype
    by_rank = [list(of_rank) for of_rank in zip(*(value.lengths for value in values))]
    lengths = [sum(of_rank) for of_rank in by_rank]
    arriving = communicator.empty(sum(lengths), dtype)

    def write(own: torch.Tensor) -> None:
        for value, part in zip(values, torch.split(own, by_rank[communicator.rank])):
            value.write(part)

    pending = communicator.all_gather_parts(arriving, lengths, write)
    if len(values) == 1:
        return [lambda: arriving.view(values[0].shape)], pending
    parts = [torch.split(of_rank, each) for of_rank, each in zip(torch.split(arriving, lengths), by_rank)]
    return [partial(_joined, value, of_value) for value, of_value in zip(values, zip(*parts))], pending


def _joined(value: FullValue, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    full = value.communicator.empty(value.shape.numel(), value.dtype)
    torch.cat(tuple(parts), out=full)
    return full.view(value.shape)


# of torch's own kinds


def is_sharded(value: Any) -> bool:
    """Whether a value is of one of torch's own kinds of sharded tensors."""
    return isinstance(value, (DTensor, ShardedTensor)) and not isinstance(value, IntervalTensor)


def unsharded(value: Any) -> Any:
    """Returns torch's own kinds of sharded tensors as full ones (collective), all else as it is."""
    if not is_sharded(value):
        return value
    if isinstance(value, DTensor):
        with deaths_told():
            return value.full_tensor()
    metadata = value.metadata()

    def write(full: torch.Tensor) -> None:
        for shard in value.local_shards():
            part = full
            for dim, (offset, size) in enumerate(
                zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
            ):
                part = part.narrow(dim, offset, size)
            part.copy_(shard.tensor)

    return assemble(metadata.size, metadata.tensor_properties.dtype, [value._process_group], write)


# from the first rank to all


def is_first_rank(handles: Iterable[ParamHandle]) -> bool:
    """Whether this is the one rank that stands for all that hold these units (0, in the default group)."""
    for handle in handles:
        return handle.communicator.rank == 0 and handle.replicas.rank == 0
    return not dist.is_initialized() or dist.get_rank() == 0


@dataclass(frozen=True)
class Announced:
    """A tensor of the first rank, which travels by itself."""

    shape: torch.Size
    dtype: torch.dtype
    own: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        return Announced, (self.shape, self.dtype)


class FirstRank:
    """The way from the first rank to all that hold a unit: over the replicas, then within each copy."""

    def __init__(self, handles: Iterable[ParamHandle]) -> None:
        handles = list(handles)
        self.is_here = is_first_rank(handles)
        self._steps: list[Communicator] = [handles[0].replicas, handles[0].communicator] if handles else []

    def object(self, value: Any) -> Any:
        """Returns the first rank's value, which must be small and picklable."""
        for communicator in self._steps:
            value = communicator.broadcast_object(value)
        return value

    def announced(self, values: Any) -> Any:
        """Returns the first rank's values, in containers: tensors with dimensions as `Announced`.

        What the other ranks give does not count.
        """
        own = pytree.tree_map_only(torch.Tensor, _announced, values) if self.is_here else None
        found = self.object(own)
        return own if self.is_here else found

    def fetched(self, value: Any) -> Any:
        """Returns a value of those with the tensors themselves; collective."""
        return pytree.tree_map_only(Announced, self._tensor, value)

    def _tensor(self, announced: Announced) -> torch.Tensor:
        device = self._steps[0].device if self._steps else torch.device("cpu")
        if announced.own is not None:
            value = announced.own.to(device).contiguous()
        else:
            value = torch.empty(announced.shape, dtype=announced.dtype, device=device)
        for communicator in self._steps:
            communicator.broadcast(value.view(-1).view(torch.uint8) if value.numel() else value)
        return value


def _announced(tensor: torch.Tensor) -> Any:
    return Announced(tensor.shape, tensor.dtype, tensor) if tensor.dim() > 0 else tensor.cpu()
