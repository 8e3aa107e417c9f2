"""Communicators: they allocate the buffers that travel in one group, and move them; their works in flight.

1-D buffers in, `Pending` out. `make_communicator` (`_comm/select.py`) is the one place that chooses among
them.
"""

from __future__ import annotations

import ctypes
import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, reduce
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from fsdp_wrap._comm.device import accelerator_of
from fsdp_wrap._comm.group_memory import GroupMemory
from fsdp_wrap._comm.groups import Ranks, twin_of
from fsdp_wrap._comm.lanes import Finished, Pending, lane_of, lane_on
from fsdp_wrap._comm.positions.group import GroupPositions, positions_of
from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._core import everywhere, warn_caller
from fsdp_wrap._core.torch_private import (
    AllgatherOptions,
    ReduceScatterOptions,
    groups_alive,
    object_device_of,
)

Tensors = list[torch.Tensor]
Fill = Callable[[], object]
FillPart = Callable[[torch.Tensor], object]
Lengths = tuple[Sequence[int], Sequence[int]]
Op = dist.ReduceOp.RedOpType
SUM = dist.ReduceOp.SUM
Purpose = Literal["gather", "reduce"]  # of a collective: each has a lane
Start = Callable[[dist.ProcessGroup, bool], list[Any]]
"""Issues collectives of a group, asynchronously or not; returns the works if so."""


# Methods of the group: torch's functions around them, with coalescing, double the host's time.
GATHER, _REDUCE = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist.ProcessGroup, "all_gather_single")  # renamed in torch 2.13
    else ("_allgather_base", "_reduce_scatter_base")
)


def _at_once_and_later(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Makes options for synchronous works, and for asynchronous ones."""
    options = make(), make()
    for later, each in enumerate(options):
        each.asyncOp = bool(later)
    return options


TO_GATHER, _TO_REDUCE = _at_once_and_later(AllgatherOptions), _at_once_and_later(ReduceScatterOptions)
"""Options of gathers and reductions, by whether works are asynchronous."""

TRANSPORTED = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that all backends know."""


def as_transport(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as bytes if not all backends know its dtype."""
    return tensor if tensor.dtype in TRANSPORTED else tensor.view(torch.uint8)


def all_gather_single(
    full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Fills a tensor of any dtype from all ranks; returns the work if that is asynchronous."""
    work = getattr(group, GATHER)(as_transport(full), as_transport(own), TO_GATHER[async_op])
    return work if async_op or work is None else work.wait()


def reduce_scatter_single(
    shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Sums a tensor over all ranks, of which each gets a part; returns the work if that is asynchronous."""
    work = getattr(group, _REDUCE)(shard, full, _TO_REDUCE[async_op])
    return work if async_op or work is None else work.wait()


REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
"""The operator of each on two tensors."""


def combine(
    sources: Sequence[torch.Tensor], target: torch.Tensor, operation: Callable[..., torch.Tensor] = torch.add
) -> None:
    """Reduces all ranks' tensors, in the order of the ranks, into `target`, which may be one of them.

    So all ranks have the same bits, every time. The arithmetic is done in the target's dtype.
    """
    if target.is_floating_point() and target.element_size() == 1:  # torch does not compute with them
        target.copy_(reduce(operation, [source.float() for source in sources]))
        return
    first, second, *rest = sources
    if first.dtype != target.dtype:
        target.copy_(first)
        first, second, *rest = target, *(source.to(target.dtype) for source in sources[1:])
    rest = [source.clone() if source is target else source for source in rest]
    operation(first, second, out=target)
    for source in rest:
        operation(target, source, out=target)


Run = Callable[[Callable[[bool], Any]], object]
"""Runs a collective to its end, given what issues it, asynchronously or not."""


def all_gather_object(
    value: Any, group: dist.ProcessGroup, run: Run = lambda start: start(False)
) -> list[Any]:
    """Returns every rank's small picklable value, by rank; torch's function of the name needs NumPy."""
    own, ranks = _pickled(value, group), dist.get_world_size(group)
    length = torch.tensor([own.numel()], device=own.device)
    lengths = length.new_empty(ranks)
    run(lambda later: all_gather_single(lengths, length, group, later))
    longest = int(lengths.max())
    full = own.new_empty(ranks * longest)
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    run(lambda later: all_gather_single(full, padded, group, later))
    return [_unpickled(part[:length]) for part, length in zip(full.chunk(ranks), lengths.tolist())]


def broadcast_object(value: Any, group: dist.ProcessGroup, run: Run = lambda start: start(False)) -> Any:
    """Returns the small picklable value of a group's first rank; torch's function needs NumPy."""
    data = _pickled(value if dist.get_rank(group) == 0 else None, group)
    length = torch.tensor([data.numel()], device=data.device)
    run(lambda later: dist.broadcast(length, group=group, group_src=0, async_op=later))
    if dist.get_rank(group) != 0:
        data = data.new_empty(int(length))
    run(lambda later: dist.broadcast(data, group=group, group_src=0, async_op=later))
    return _unpickled(data)


def _pickled(value: Any, group: dist.ProcessGroup) -> torch.Tensor:
    device = object_device_of(group)
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(data: torch.Tensor) -> Any:
    data = data.cpu()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))


resize_watchers: list[Callable[[torch.UntypedStorage], None]] = []
"""Called when memory of a buffer has come or gone."""


def tell_resized(storage: torch.UntypedStorage) -> None:
    """Tells the watchers that memory has come or gone."""
    for watcher in tuple(resize_watchers):
        watcher(storage)


class Buffer:
    """A 1-D tensor whose memory comes and goes while views of it stay valid objects.

    It starts allocated: views can be made only while it is. They must not be used while it is freed.

    Attributes:
        storages: Keys of the storages that it consists of.
    """

    temporary = True  # whether the content matters only while it is allocated

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._lie_in(torch.empty(numel, dtype=dtype, device=device))

    def _lie_in(self, tensor: torch.Tensor) -> None:
        self.tensor, self.data = tensor, tensor.data  # writes to `data` do not move the version counter
        self.nbytes = tensor.numel() * tensor.element_size()
        self._storage = tensor.untyped_storage()
        self.storages = {self._storage._cdata}

    @property
    def allocated(self) -> bool:
        """Whether the memory is there."""
        return self.nbytes == 0 or self._storage.nbytes() > 0

    @property
    def resizable(self) -> bool:
        """Whether the memory can come and go: not once it is shared with NumPy."""
        return self._storage.resizable()

    def allocate(self) -> None:
        """Gets memory, with undefined content."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
            if resize_watchers:
                tell_resized(self._storage)

    def free(self) -> bool:
        """Gives the memory back; returns False where it cannot go, as `resizable` tells."""
        if self._storage.nbytes():
            if not self._storage.resizable():
                return False
            self._storage.resize_(0)
            if resize_watchers:
                tell_resized(self._storage)
        return True

    def keep_alone(self) -> None:
        """Moves the content to memory of its own if other ranks can see it."""
        return None


class ResidentBuffer(Buffer):
    """A buffer over memory that stays: a shard that is the whole parameter (NO_SHARD)."""

    temporary = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._lie_in(tensor)

    @property
    def resizable(self) -> bool:
        return True

    def free(self) -> bool:
        return True


class PooledBuffer(Buffer):
    """A buffer in a group's memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, memory: GroupMemory) -> None:
        with memory.allocating():
            super().__init__(numel, dtype, device)
        self._memory = memory

    def allocate(self) -> None:
        if self._storage.nbytes() != self.nbytes:
            with self._memory.allocating():
                super().allocate()


def destroyed() -> RuntimeError:
    """Returns the error of a module whose process group is gone."""
    return RuntimeError("the process group of this wrapped module was destroyed; wrap it anew")


_FIRST_LOOK = 0.25  # seconds; beside such a wait, looking costs nothing
_FIRST_LIMIT = timedelta(seconds=_FIRST_LOOK)
_LATER_LOOKS = 1.0
_LAST_LOOK = 0.01  # rounded to no milliseconds it would be no limit


class InFlight(ABC):
    """Something of a group's that was issued just now."""

    def __init__(self, watch: Watch, works: Sequence[Any] = ()) -> None:
        self._watch, self._works = watch, works
        self._number = watch.positions.issued
        self._begin = time.monotonic()
        self._ended, self._warned = False, False
        self._failure: str | None = None  # not the error, which would hold the frames of its waiter

    @abstractmethod
    def _wait_for(self, seconds: float) -> bool:
        """Waits some seconds at most; returns whether it has ended. Called until it has, or has failed."""

    def wait(self, pause: float = _FIRST_LOOK) -> None:
        """Waits until it has ended, with a first look at the ranks after `pause` seconds.

        Raises a RuntimeError if it has failed, or does not end, or a peer has issued something else.
        """
        while not self._ended:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            try:
                self._ended = self._wait_for(pause)
            except RuntimeError as error:
                self._failure = str(error)
                try:
                    raise self._watch.failure(error) from error  # or that raises: peers issued another one
                except RuntimeError as told:
                    self._failure = str(told)  # for what waits again when the error passes through it
                    raise
            if not self._ended:
                pause = min(max(2 * pause, 2 * _FIRST_LOOK), _LATER_LOOKS)
                pause = max(min(pause, self._look()), _LAST_LOOK)

    def _look(self) -> float:
        """Looks at the ranks and warns once; returns the seconds left, or raises a RuntimeError."""
        watch, waited = self._watch, time.monotonic() - self._begin
        watch.positions.compare_all()
        watch.require_living(self._number)
        left = watch.time_left(waited)
        if left <= 0:
            raise RuntimeError(watch.report(waited, self._number))
        if not self._warned and watch.is_late(waited):
            warn_caller(watch.report(waited, self._number))
            self._warned = True
        return left


class Works(InFlight):
    """Works of the process group."""

    def wait(self, pause: float = _LAST_LOOK) -> None:
        try:
            for work in self._works:
                work.wait(_FIRST_LIMIT)
        except RuntimeError:  # one is late, or has failed
            super().wait(pause)

    def _wait_for(self, seconds: float) -> bool:
        limit = timedelta(seconds=seconds)
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError:
                if not work.is_completed():  # it goes on: only the waiting has ended
                    return False
                work.wait()  # raises its error, or has succeeded just after the limit
        return True


class WorksWithoutLimit(InFlight):
    """Works to wait for once all peers have come: nothing could end a wait for a missing one."""

    def _wait_for(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._watch.positions.reached(self._number):
            waited = time.monotonic() - begin
            if waited > seconds:
                return False
            time.sleep(min(waited / 8, 0.001))  # late by a small part of the whole wait
        for work in self._works:
            work.wait()
        return True


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
            told = "; ".join(f"rank {rank} chose {each}" for rank, each in zip(sorted(self.members), by_rank))
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
        self._watch = Watch(ranks.group, device, positions)
        self._compare_first: Callable[[], object] | None = None
        on = accelerator_of(device)
        self._on_host = on is None
        self._lanes = {} if on is None else {each: lane_on(on, each) for each in ("gather", "reduce")}
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
        for each in full:
            each = each if each.dtype in TRANSPORTED else each.view(torch.uint8)
            length = each.numel() // self.size
            own = each[self.rank * length : (self.rank + 1) * length]
            works.append(gather(each, own, TO_GATHER[async_op]))
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
        for shard, each in zip(shards, full):
            # Where this is a copy, it belongs to the stream that is current here.
            same = each.dtype == shard.dtype
            summed = each if same else self.empty(each.numel(), shard.dtype).copy_(each)
            if self.memory is not None:
                self.memory.admit([summed, shard], group)
            works.append(reduce_scatter_single(shard, summed, group, async_op))
        return works

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        def start(group: dist.ProcessGroup, async_op: bool) -> list[Any]:
            return [dist.all_reduce(each, op=op, group=group, async_op=async_op) for each in tensors]

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
