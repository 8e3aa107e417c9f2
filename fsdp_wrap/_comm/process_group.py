"""Communicators: they allocate the buffers that travel in one group, and move them.

1-D buffers in, `Pending` out. `make_communicator` (`_comm/select.py`) is the one place that chooses among
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from fsdp_wrap._comm.buffers import Buffer, PooledBuffer
from fsdp_wrap._comm.collectives import (
    GATHER,
    TO_GATHER,
    TRANSPORTED,
    all_gather_object,
    as_transport,
    broadcast_object,
    reduce_scatter_single,
)
from fsdp_wrap._comm.device import accelerator_of
from fsdp_wrap._comm.group_memory import GroupMemory
from fsdp_wrap._comm.groups import Ranks, once_for, twin_of
from fsdp_wrap._comm.lanes import Finished, Pending, lane_of, lane_on
from fsdp_wrap._comm.positions.group import GroupPositions, positions_of
from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._comm.works import InFlight, Works, WorksWithoutLimit
from fsdp_wrap._core import everywhere
from fsdp_wrap._core.torch_private import groups_alive

Tensors = list[torch.Tensor]
Fill = Callable[[], object]
FillPart = Callable[[torch.Tensor], object]
Lengths = tuple[Sequence[int], Sequence[int]]
Op = dist.ReduceOp.RedOpType
SUM = dist.ReduceOp.SUM
Purpose = Literal["gather", "reduce"]  # of a collective: each has a lane
Start = Callable[[dist.ProcessGroup, bool], list[Any]]
"""Issues collectives of a group, asynchronously or not; returns the works if so."""


def destroyed() -> RuntimeError:
    """Returns the error of a module whose process group is gone."""
    return RuntimeError("the process group of this wrapped module was destroyed; wrap it anew")


class Communicator:
    """A way of communicating within one group; this one is for a rank alone, so that nothing travels.

    `positions` is None without a group.
    """

    keeps_notes = True  # whether sums keep the sign of zeros, and make nothing else zero
    compresses_reductions = False
    settings: Sequence[str] = ()  # that chose this way of communicating; alike on all ranks
    memory: GroupMemory | None = None  # of buffers from now on; None for ordinary memory

    def __init__(
        self, rank: int, size: int, device: torch.device, positions: GroupPositions | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.positions = positions

    def _identity(self) -> object:
        """Compares equal for interchangeable communicators."""
        return self.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communicator) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def members(self) -> frozenset[int]:
        """Global ranks of the group."""
        return frozenset([dist.get_rank() if dist.is_initialized() else 0])

    @property
    def way(self) -> str:
        """The way of communicating, for messages; "" for the process group's own."""
        return ""

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        """Returns a buffer that can travel."""
        if self.memory is not None:
            return PooledBuffer(numel, dtype, self.device, self.memory)
        return Buffer(numel, dtype, self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor that can travel."""
        if self.memory is None and not torch.is_inference_mode_enabled():
            return torch.empty(numel, dtype=dtype, device=self.device)
        allocating = nullcontext() if self.memory is None else self.memory.allocating()
        with allocating, torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_on_host(self, numel: int, dtype: torch.dtype, pin: bool = True) -> torch.Tensor:
        """Returns an uninitialised 1-D tensor in host memory; the device can copy from it if pinned."""
        accelerator = accelerator_of(self.device)
        with torch.inference_mode(False):
            if accelerator is None:
                return torch.empty(numel, dtype=dtype, device="cpu")
            return accelerator.empty_on_host(numel, dtype, pin)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group by which it communicates; None where nothing travels."""
        return None

    def allocate_in(self, memory: GroupMemory | None) -> None:
        """Chooses the memory of buffers from now on; for groups on an accelerator."""
        self.memory = memory

    @property
    def reducing_group(self) -> dist.ProcessGroup | None:
        """The process group of reductions, if it is not that of gathers."""
        return None

    def reduce_apart(self, apart: bool) -> None:
        """Lets reductions travel in a process group of their own, or again in that of the gathers.

        Collective where that is a new one. Nothing changes where they do not queue behind each other.
        """
        return None

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the view of an evenly sharded 1-D tensor that belongs to this rank."""
        length = full.numel() // self.size
        return full[self.rank * length : (self.rank + 1) * length]  # which costs less than narrow()

    def gather_into(self, buffers: list[Buffer], fill: Fill) -> Pending:
        """Allocates buffers and fills them from all ranks, after `fill` has written this rank's own parts."""
        full = []
        for buffer in buffers:
            buffer.allocate()
            full.append(buffer.data)
        return self.all_gather(full, fill)

    def all_gather(self, full: Tensors, fill: Fill) -> Pending:
        """Fills each of `full` from all ranks, after `fill` has written this rank's own parts."""

        def start(async_op: bool) -> None:
            fill()

        return lane_of(self.device, "gather").issue(start)

    def all_gather_parts(self, full: torch.Tensor, lengths: Sequence[int], fill: FillPart) -> Pending:
        """Fills a 1-D tensor by consecutive parts of these lengths, one per rank; `fill` writes its own."""
        return self.all_gather([full], lambda: fill(full))

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        """Writes this rank's part of the sum of `full` over the ranks into `shards`; `full` is spoiled.

        `full` may be of a narrower dtype; the sum is in that of the shards.
        """
        for shard, source in zip(shards, full):
            shard.copy_(source)
        return Finished()

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        """Reduces each tensor in place."""
        return Finished()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites a contiguous tensor with that of the group's first rank; blocks."""
        return None

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        """Fills `full`, which the first rank alone passes, with the `own` of all ranks; blocks."""
        assert full is not None
        if own.data_ptr() != full.data_ptr():
            full.copy_(own)

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        """Fills `own` with this rank's part of `full`, which the first rank alone passes; blocks."""
        assert full is not None
        own.copy_(full)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's small picklable value, by rank; blocks."""
        return [value]

    def agree(self, call: str, chosen: object) -> None:
        """Raises a ValueError on all ranks if they pass other arguments to a call; blocks."""
        by_rank = self.all_gather_object(chosen)
        if any(other != chosen for other in by_rank):
            ranks = zip(sorted(self.members), by_rank)
            told = "; ".join(f"rank {rank} chose {other}" for rank, other in ranks)
            raise ValueError(f"all ranks must call {call} with the same arguments: {told}")

    def broadcast_object(self, value: Any) -> Any:
        """Returns the small picklable value of the group's first rank; blocks."""
        return value

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, lengths: Lengths | None = None
    ) -> Pending:
        """Sends each rank its part of the 1-D `sent`; `received` gets the parts in the order of the ranks.

        `lengths` are the numbers of elements from each rank, and to each; None for even parts.
        """
        received.copy_(sent)
        return Finished()


class GroupCommunicator(Communicator):
    """A communicator by the process group's own collectives, on two lanes.

    By NCCL they queue behind each other unless the lanes have two groups.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        positions = positions_of(ranks.group)
        super().__init__(ranks.rank, ranks.size, device, positions)
        # Weak, since a group that outlives destroy_process_group() can abort the process when it exits.
        self._reference = weakref.ref(ranks.group)
        self._reducing = self._reference
        self._watch = once_for(ranks.group, ("watch", device), lambda: Watch(ranks.group, device, positions))
        self._compare_first: Callable[[], object] | None = None
        on = accelerator_of(device)
        self._on_host = on is None
        self._lanes = {} if on is None else {name: lane_on(on, name) for name in ("gather", "reduce")}
        # On the CPU a reduce-scatter's work takes no limit and does not tell whether it has completed.
        self._reduction_in_flight: type[InFlight] = WorksWithoutLimit if self._on_host else Works

    def _identity(self) -> object:
        return self.device, self._reference

    def compare(self, settings: Sequence[str], compare: Callable[[], object]) -> None:
        """Lets ranks compare the settings that chose this communicator, before the first collective."""
        self.settings, self._compare_first = settings, compare

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._reference()
        if group is None:
            raise destroyed()
        return group

    @property
    def reducing_group(self) -> dist.ProcessGroup | None:
        return None if self._reducing is self._reference else self._reducing()

    def reduce_apart(self, apart: bool) -> None:
        if not self._on_host:
            self._reducing = weakref.ref(twin_of(self.group)) if apart else self._reference

    def require_group(self) -> None:
        """Raises a RuntimeError if the process group was destroyed."""
        if self._reference() not in groups_alive().pg_map:  # it may live on, destroyed
            raise destroyed()

    @property
    def members(self) -> frozenset[int]:
        return frozenset(dist.get_process_group_ranks(self.group))

    def _issue(self, purpose: Purpose, start: Start, in_flight: type[InFlight] = Works) -> Pending:
        """Issues collectives, on the lane of their purpose if there are lanes; raises if one fails.

        `start` issues them in the group, asynchronously or not, and returns the works if so.
        """
        reference = self._reducing if purpose == "reduce" else self._reference
        group = reference()
        if group is None:
            raise destroyed()
        if self._compare_first is not None:
            self._compare()
        if not self._on_host and self._watch.positions.verdict is not None:  # as the monitor found
            raise RuntimeError(self._watch.positions.verdict)
        try:
            if not self._on_host:
                # What is never waited for is held, but not the group; see __init__.
                return self._lanes[purpose].issue(
                    lambda later: start(cast(dist.ProcessGroup, reference()), later), self._watch
                )
            works = start(group, True)
        except RuntimeError as error:
            raise self._watch.failure(error) from error
        for act in everywhere.issued:
            act(works)
        return in_flight(self._watch, works)

    def _compare(self) -> None:
        """Compares what all ranks must have alike, before the first collective; if it raises, then again."""
        if self._compare_first is not None:
            self._compare_first()
            self._compare_first = None

    def all_gather(self, full: Tensors, fill: Fill) -> Pending:
        return self._issue("gather", partial(self._gather, full, fill))

    def _gather(self, full: Tensors, fill: Fill, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        if self.memory is not None:
            self.memory.admit(full, group)
        fill()
        gather, works = getattr(group, GATHER), []
        for tensor in full:
            target = tensor if tensor.dtype in TRANSPORTED else tensor.view(torch.uint8)
            length = target.numel() // self.size
            own = target[self.rank * length : (self.rank + 1) * length]
            works.append(gather(target, own, TO_GATHER[async_op]))
        return works if async_op else [work.wait() for work in works if work is not None]

    def all_gather_parts(self, full: torch.Tensor, lengths: Sequence[int], fill: FillPart) -> Pending:
        parts = torch.split(full, list(lengths))

        def start(group: dist.ProcessGroup, async_op: bool) -> list[Any]:
            fill(parts[self.rank])
            return [
                dist.broadcast(as_transport(part), group=group, group_src=rank, async_op=async_op)
                for rank, part in enumerate(parts)
                if part.numel() > 0
            ]

        return self._issue("gather", start)

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        return self._issue("reduce", partial(self._reduce, shards, full), self._reduction_in_flight)

    def _reduce(self, shards: Tensors, full: Tensors, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        works = []
        for shard, source in zip(shards, full):
            # Where this is a copy, it belongs to the stream that is current here.
            same = source.dtype == shard.dtype
            summed = source if same else self.empty(source.numel(), shard.dtype).copy_(source)
            if self.memory is not None:
                self.memory.admit([summed, shard], group)
            works.append(reduce_scatter_single(shard, summed, group, async_op))
        return works

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        def start(group: dist.ProcessGroup, async_op: bool) -> list[Any]:
            return [dist.all_reduce(tensor, op=op, group=group, async_op=async_op) for tensor in tensors]

        return self._issue("reduce", start)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._run(lambda later: dist.broadcast(tensor, group=self.group, group_src=0, async_op=later))

    def _run(self, start: Callable[[bool], Any]) -> None:
        """Runs one collective of the group to its end."""
        self._issue("gather", lambda _, later: [start(later)]).wait()

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        collective = partial(dist.gather, as_transport(own), self._parts(full), group=self.group)
        self._run(lambda later: collective(group_dst=0, async_op=later))

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        collective = partial(dist.scatter, as_transport(own), self._parts(full), group=self.group)
        self._run(lambda later: collective(group_src=0, async_op=later))

    def _parts(self, full: torch.Tensor | None) -> list[torch.Tensor] | None:
        return None if full is None else list(as_transport(full).chunk(self.size))

    def all_gather_object(self, value: Any) -> list[Any]:
        return all_gather_object(value, self.group, self._run)

    def broadcast_object(self, value: Any) -> Any:
        return broadcast_object(value, self.group, self._run)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, lengths: Lengths | None = None
    ) -> Pending:
        coming, going = (None, None) if lengths is None else map(list, lengths)

        def start(group: dist.ProcessGroup, async_op: bool) -> list[Any]:
            return [dist.all_to_all_single(received, sent, coming, going, group, async_op)]

        return self._issue("reduce", start)
