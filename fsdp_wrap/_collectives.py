"""The communicator of a group: allocates the buffers that travel and moves them.

1-D buffers in, `Pending` out. Nothing here knows of parameters, and nothing above here knows which way of
communicating is in use: `make_communicator` (`_communicators.py`) is the one place that chooses.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._device import Finished, Lane, Pending, lane_of
from fsdp_wrap._exchange import exchange_gather, exchange_reduce
from fsdp_wrap._groups import is_destroyed
from fsdp_wrap._mesh import Ranks
from fsdp_wrap._objects import (
    all_gather_object,
    all_gather_single,
    as_transport,
    broadcast_object,
    reduce_scatter_single,
)
from fsdp_wrap._positions import GroupPositions, positions_of
from fsdp_wrap._resizable import Buffer
from fsdp_wrap._watch import ComparingWatch, Watch

__all__ = [
    "Communicator",
    "ExchangeCommunicator",
    "GroupCommunicator",
    "SoloCommunicator",
]

_DATA = attrgetter("data")
_DESTROYED = "the process group of this wrapped module was destroyed; wrap it anew"


class Communicator(ABC):
    """A way of communicating within one group.

    Attributes:
        rank: This process's rank in the group.
        size: How many ranks it has.
        device: Where the buffers live.
        positions: Where the ranks of the group stand; None without a group.
        keeps_notes: Whether in sums zeros keep their sign, and nothing else becomes zero.
        compresses_reductions: Whether gradients travel in fewer bytes than they have.
        settings: What has chosen this way of communicating, which all ranks must have alike.
    """

    keeps_notes = True
    compresses_reductions = False
    settings: Sequence[str] = ()

    def __init__(
        self, rank: int, size: int, device: torch.device, positions: GroupPositions | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.positions = positions

    def _identity(self) -> object:
        """What makes two communicators interchangeable."""
        return self.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communicator) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def members(self) -> frozenset[int]:
        """The group's ranks, as the default group counts them."""
        return frozenset([dist.get_rank() if dist.is_initialized() else 0])

    @property
    def way(self) -> str:
        """How it communicates, where that is not by the process group; for messages."""
        return ""

    def require_group(self) -> None:
        """Raises a RuntimeError if the process group was destroyed."""
        return None

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Returns a buffer that can travel."""
        return Buffer(numel, dtype, self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor that can travel."""
        if not torch.is_inference_mode_enabled():
            return torch.empty(numel, dtype=dtype, device=self.device)
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor in host memory; if pinned, the device can copy by itself."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, pin_memory=pin and self.device.type != "cpu")

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the view of an evenly sharded 1-D tensor that belongs to this rank."""
        length = full.numel() // self.size
        return full[self.rank * length : (self.rank + 1) * length]  # which costs less than narrow()

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        """Allocates buffers and fills them from all ranks, after `fill` has written this rank's own parts."""
        for buffer in buffers:
            buffer.allocate()
        return self.all_gather([*map(_DATA, buffers)], fill)

    @abstractmethod
    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        """Fills each of `full` from all ranks, after `fill` has written this rank's own parts."""

    @abstractmethod
    def all_gather_parts(
        self, full: torch.Tensor, lengths: Sequence[int], fill: Callable[[torch.Tensor], object]
    ) -> Pending:
        """Fills a 1-D tensor by consecutive parts of these lengths, one per rank; `fill` writes its own."""

    @abstractmethod
    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        """Writes this rank's part of the sum of `full` over the ranks into `shards`; `full` is spoiled.

        What is summed may be of a narrower dtype; the sum is in that of the shards.
        """

    @abstractmethod
    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """Reduces each tensor in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites a contiguous tensor with that of the group's first rank; blocks."""

    @abstractmethod
    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        """Fills `full`, which the first rank alone passes, with the `own` of all ranks; blocks."""

    @abstractmethod
    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        """Fills `own` with this rank's part of `full`, which the first rank alone passes; blocks."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's small picklable value, by rank; blocks."""

    @abstractmethod
    def broadcast_object(self, value: Any) -> Any:
        """Returns the small picklable value of the group's first rank; blocks."""

    @abstractmethod
    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        """Sends each rank its even part of a 1-D tensor; what comes lies in the order of the ranks."""


class SoloCommunicator(Communicator):
    """One rank alone: nothing travels."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, 1, device)

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        def start(async_op: bool) -> None:
            fill()

        return lane_of(self.device, "gather").issue(start)

    def all_gather_parts(
        self, full: torch.Tensor, lengths: Sequence[int], fill: Callable[[torch.Tensor], object]
    ) -> Pending:
        return self.all_gather([full], lambda: fill(full))

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        for shard, source in zip(shards, full):
            shard.copy_(source)
        return Finished()

    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        return Finished()

    def broadcast(self, tensor: torch.Tensor) -> None:
        return None

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        assert full is not None
        if own.data_ptr() != full.data_ptr():
            full.copy_(own)

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        assert full is not None
        own.copy_(full)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        received.copy_(sent)
        return Finished()


class GroupCommunicator(Communicator):
    """The process group's own collectives, on two lanes: gathers never queue behind reductions."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        positions = positions_of(ranks.group)
        super().__init__(ranks.rank, ranks.size, device, positions)
        # Weak, since a group that outlives destroy_process_group() can abort the process when it exits.
        self._reference = weakref.ref(ranks.group)
        self._watch = Watch(ranks.group, device, positions)
        self._gather_lane = lane_of(device, "gather")
        self._reduce_lane = lane_of(device, "reduce")

    def _identity(self) -> object:
        return self.device, self._reference

    def compare(self, settings: Sequence[str], compare: Callable[[], object]) -> None:
        """Lets ranks compare, before the first collective, what has chosen this way of communicating."""
        self.settings = settings
        self._watch = ComparingWatch(self._group, self.device, self._watch.positions, compare)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise RuntimeError(_DESTROYED)
        return group

    def require_group(self) -> None:
        if is_destroyed(self._reference()):
            raise RuntimeError(_DESTROYED)

    @property
    def members(self) -> frozenset[int]:
        return frozenset(dist.get_process_group_ranks(self._group))

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        def start(async_op: bool) -> list[Any]:
            fill()
            return [self._gather(tensor, async_op) for tensor in full]

        return self._issue(self._gather_lane, start)

    def _gather(self, full: torch.Tensor, async_op: bool) -> Any:
        full = as_transport(full)
        return all_gather_single(full, self.own_part(full), self._group, async_op)

    def all_gather_parts(
        self, full: torch.Tensor, lengths: Sequence[int], fill: Callable[[torch.Tensor], object]
    ) -> Pending:
        parts = torch.split(full, list(lengths))

        def start(async_op: bool) -> list[Any]:
            fill(parts[self.rank])
            return [self._send(part, rank, async_op) for rank, part in enumerate(parts) if part.numel() > 0]

        return self._issue(self._gather_lane, start)

    def _send(self, tensor: torch.Tensor, source: int, async_op: bool) -> Any:
        return dist.broadcast(as_transport(tensor), group=self._group, group_src=source, async_op=async_op)

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        def start(async_op: bool) -> list[Any]:
            return [self._reduce(shard, source, async_op) for shard, source in zip(shards, full)]

        return self._issue(self._reduce_lane, start, limited=self._limits_reduction(full))

    def _limits_reduction(self, full: list[torch.Tensor]) -> bool:
        """Whether waiting for a reduce-scatter keeps to a limit."""
        # On the CPU it takes none and does not tell whether it has completed.
        return self.device.type != "cpu"

    def _reduce(self, shard: torch.Tensor, full: torch.Tensor, async_op: bool) -> Any:
        # Where this is a copy, it belongs to the stream that is current here.
        summed = full if full.dtype == shard.dtype else full.to(shard.dtype)
        return reduce_scatter_single(shard, summed, self._group, async_op)

    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        def start(async_op: bool) -> list[Any]:
            return [dist.all_reduce(each, op=op, group=self._group, async_op=async_op) for each in tensors]

        return self._issue(self._reduce_lane, start)

    def _issue(self, lane: Lane, start: Callable[[bool], list[Any]], limited: bool = True) -> Pending:
        return self._watch.issue(partial(lane.issue, start), limited)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._run(lambda later: dist.broadcast(tensor, group=self._group, group_src=0, async_op=later))

    def _run(self, start: Callable[[bool], Any]) -> None:
        """Runs one collective of the group to its end."""
        self._issue(self._gather_lane, lambda later: [start(later)]).wait()

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        def start(async_op: bool) -> Any:
            source, parts = as_transport(own), self._parts(full)
            return dist.gather(source, parts, group=self._group, group_dst=0, async_op=async_op)

        self._run(start)

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        def start(async_op: bool) -> Any:
            target, parts = as_transport(own), self._parts(full)
            return dist.scatter(target, parts, group=self._group, group_src=0, async_op=async_op)

        self._run(start)

    def _parts(self, full: torch.Tensor | None) -> list[torch.Tensor] | None:
        return None if full is None else list(as_transport(full).chunk(self.size))

    def all_gather_object(self, value: Any) -> list[Any]:
        return all_gather_object(value, self._group, self._run)

    def broadcast_object(self, value: Any) -> Any:
        return broadcast_object(value, self._group, self._run)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        def start(async_op: bool) -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self._group, async_op=async_op)]

        return self._issue(self._reduce_lane, start)


class ExchangeCommunicator(GroupCommunicator):
    """Messages between every two ranks where tensors are large enough, else the group's own collectives.

    Args:
        ranks: The group, over gloo.
        device: The CPU.
        least: From how many bytes on a full tensor is exchanged, the same on all ranks; infinite for never.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float) -> None:
        super().__init__(ranks, device)
        self._least = least

    def _gather(self, full: torch.Tensor, async_op: bool) -> Any:
        if full.nbytes < self._least:
            return super()._gather(full, async_op)
        return exchange_gather(self._group, self.rank, self._by_rank(as_transport(full)), self._lives)

    def _limits_reduction(self, full: list[torch.Tensor]) -> bool:
        return all(tensor.nbytes >= self._least for tensor in full)

    def _reduce(self, shard: torch.Tensor, full: torch.Tensor, async_op: bool) -> Any:
        if full.nbytes < self._least:
            return super()._reduce(shard, full, async_op)
        return exchange_reduce(self._group, self.rank, shard, self._by_rank(full), self._lives)

    def _by_rank(self, full: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(enumerate(full.chunk(self.size)))

    def _lives(self, rank: int) -> bool:
        assert self.positions is not None
        return self.positions.lives(dist.get_global_rank(self._group, rank))
