"""Process groups of ranks that are threads, each with a simulated accelerator.

The bytes move at once, when all ranks have come. The simulation notes what each collective reads and writes.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bed.accelerator.replay import Part
from bed.accelerator.simulation import Simulation

BACKEND = "simulated"


class Meeting:
    """Where the ranks of a group bring their data; the last one to come does the work."""

    def __init__(self, size: int) -> None:
        self._size, self._round = size, 0
        self._data: dict[int, Any] = {}
        self._changed = threading.Condition()

    def come(self, rank: int, data: Any, work: Any) -> None:
        with self._changed:
            self._data[rank] = data
            mine = self._round
            if len(self._data) == self._size:
                with _disable_current_modes(), _nobody_looks():
                    work.work([self._data[other] for other in range(self._size)])
                self._data = {}  # nobody's memory outlives this by us
                self._round += 1
                self._changed.notify_all()
            while self._round == mine:
                self._changed.wait(0.5)
                if threaded.ProcessLocalGroup._terminate.is_set():
                    raise RuntimeError("another rank has failed")


class _Arrivals:
    """One collective for which no host waits; it is done when all ranks have come with as much data.

    Nothing moves: by then a host that has gone on may have given the memory to others.
    """

    def __init__(self, size: int) -> None:
        self.done = False
        self._size, self._sizes = size, dict[int, tuple[int, ...]]()
        self._lock = threading.Lock()

    def come(self, rank: int, data: Any) -> None:
        with self._lock:
            self._sizes[rank] = tuple(tensor.numel() for tensor in tree_leaves(data))
            self.done = len(self._sizes) == self._size and len({*self._sizes.values()}) == 1


def _nobody_looks() -> AbstractContextManager[None]:
    """Hides collective work of all ranks from this rank's simulation."""
    simulation = Simulation.here()
    return nullcontext() if simulation is None else simulation.aside()


class SimulatedGroup(threaded.ProcessLocalGroup):
    """A group whose collectives run on the stream that is current."""

    _meetings: ClassVar[dict[str, Meeting]] = {}
    _arrivals: ClassVar[dict[tuple[str, int], _Arrivals]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._issued = 0

    def _run(self, what: str, work: Any, data: Any, reads: Any, writes: Any) -> Any:
        simulation = Simulation.here()
        self._issued += 1
        if simulation is not None:
            part = Part((self.pg_name, self._issued), self._rank, self._world_size, work, data)
            over = simulation.collective(what, part, tree_leaves(reads), tree_leaves(writes))
            if simulation.runs_ahead:
                with self._lock:
                    place = (self.pg_name, self._issued)
                    arrivals = self._arrivals.setdefault(place, _Arrivals(self._world_size))
                simulation.current_stream().follow(arrivals)
                arrivals.come(self._rank, data)
                return threaded.ret_work(None)
        with self._lock:
            meeting = self._meetings.setdefault(self.pg_name, Meeting(self._world_size))
        meeting.come(self._rank, data, work)
        # An event has the one method of a work that is called: `wait`, an order to the current stream.
        return over if simulation is not None and simulation.group_has_stream else threaded.ret_work(None)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._run("all_gather", threaded.AllGather(), (outputs, inputs), inputs, outputs)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.chunk(self._world_size))], [own])

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        work = threaded.ReduceScatter(opts.reduceOp)
        return self._run("reduce_scatter", work, (outputs, inputs), inputs, outputs)

    def reduce_scatter_single(self, output: Any, full: Any, opts: Any) -> Any:  # type: ignore[override]
        return self.reduce_scatter([output], [list(full.chunk(self._world_size))], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def allreduce(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        return self._run("all_reduce", threaded.AllReduce(opts.reduceOp), tensors, [], tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:  # type: ignore[override]
        reads, writes = (tensors, []) if self._rank == opts.rootRank else ([], tensors)
        return self._run("broadcast", threaded.Broadcast(opts.rootRank), tensors, reads, writes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        return self._run("scatter", threaded.Scatter(opts.rootRank), (outputs, inputs), inputs, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:  # type: ignore[override]
        return self._run("gather", threaded.Gather(opts.rootRank), (outputs, inputs), inputs, outputs)

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, got: Any = None, sent: Any = None, opts: Any = None
    ) -> Any:
        return self._run("all_to_all", threaded.AllToAllBase(), (output, own, got, sent), own, output)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        nothing = torch.zeros(0)
        return self._run("barrier", threaded.Broadcast(0), [nothing], [], [])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return BACKEND


def _create(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    group = SimulatedGroup(rank, size)
    dist.distributed_c10d._store_based_barrier(rank, store, "", size, timeout)  # type: ignore[arg-type]
    return group


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
